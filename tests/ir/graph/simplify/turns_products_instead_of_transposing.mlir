// RUN: nova-opt simplify
// A transposed product used for nothing else becomes the product of the transposes, and x @ transpose(w) is a linear.

// CHECK-LABEL: func.func @weight_gradient
// CHECK-NEXT:    %[[T:.*]] = "nova.transpose"(%arg1) {permutation = array<i64: 1, 0>}
// CHECK-NEXT:    %[[D:.*]] = "nova.matmul"(%[[T]], %arg0) : (tensor<7x3xf32>, tensor<3x5xf32>) -> tensor<7x5xf32>
// CHECK-NEXT:    return %[[D]]
func.func @weight_gradient(%x: tensor<3x5xf32>, %dy: tensor<3x7xf32>) -> tensor<7x5xf32> {
  %0 = "nova.transpose"(%x) {permutation = array<i64: 1, 0>} : (tensor<3x5xf32>) -> tensor<5x3xf32>
  %1 = "nova.matmul"(%0, %dy) : (tensor<5x3xf32>, tensor<3x7xf32>) -> tensor<5x7xf32>
  %2 = "nova.transpose"(%1) {permutation = array<i64: 1, 0>} : (tensor<5x7xf32>) -> tensor<7x5xf32>
  return %2 : tensor<7x5xf32>
}

// CHECK-LABEL: func.func @used_twice
// CHECK:         %[[P:.*]] = "nova.matmul"(%arg0, %arg1)
// CHECK-NEXT:    %[[T:.*]] = "nova.transpose"(%[[P]])
// CHECK-NEXT:    return %[[P]], %[[T]]
func.func @used_twice(%x: tensor<3x5xf32>, %y: tensor<5x7xf32>) -> (tensor<3x7xf32>, tensor<7x3xf32>) {
  %0 = "nova.matmul"(%x, %y) : (tensor<3x5xf32>, tensor<5x7xf32>) -> tensor<3x7xf32>
  %1 = "nova.transpose"(%0) {permutation = array<i64: 1, 0>} : (tensor<3x7xf32>) -> tensor<7x3xf32>
  return %0, %1 : tensor<3x7xf32>, tensor<7x3xf32>
}

// CHECK-LABEL: func.func @linear
// CHECK-NEXT:    %[[L:.*]] = "nova.linear"(%arg0, %arg1)
// CHECK-NEXT:    %[[M:.*]] = "nova.matmul"(%[[L]], %arg1)
// CHECK-NEXT:    return %[[M]]
func.func @linear(%x: tensor<3x5xf32>, %w: tensor<7x5xf32>) -> tensor<3x5xf32> {
  %0 = "nova.transpose"(%w) {permutation = array<i64: 1, 0>} : (tensor<7x5xf32>) -> tensor<5x7xf32>
  %1 = "nova.matmul"(%x, %0) : (tensor<3x5xf32>, tensor<5x7xf32>) -> tensor<3x7xf32>
  %2 = "nova.linear"(%1, %0) : (tensor<3x7xf32>, tensor<5x7xf32>) -> tensor<3x5xf32>
  return %2 : tensor<3x5xf32>
}
