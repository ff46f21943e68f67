// RUN: nova-opt simplify
// Views of views are one view, and views that change nothing are gone.

// CHECK-LABEL: func.func @reshapes
// CHECK-NEXT:    %[[R:.*]] = "nova.reshape"(%arg0) : (tensor<2x3x8xf32>) -> tensor<3x2x8xf32>
// CHECK-NEXT:    return %[[R]], %arg0
func.func @reshapes(%x: tensor<2x3x8xf32>) -> (tensor<3x2x8xf32>, tensor<2x3x8xf32>) {
  %0 = "nova.reshape"(%x) : (tensor<2x3x8xf32>) -> tensor<6x8xf32>
  %1 = "nova.reshape"(%0) : (tensor<6x8xf32>) -> tensor<3x2x8xf32>
  %2 = "nova.reshape"(%0) : (tensor<6x8xf32>) -> tensor<2x3x8xf32>
  return %1, %2 : tensor<3x2x8xf32>, tensor<2x3x8xf32>
}

// CHECK-LABEL: func.func @transposes
// CHECK-NEXT:    %[[T:.*]] = "nova.transpose"(%arg0) {permutation = array<i64: 2, 0, 1>}
// CHECK-NEXT:    %[[R:.*]] = "nova.reshape"(%arg1) : (tensor<4x1x5xf32>) -> tensor<1x4x5xf32>
// CHECK-NEXT:    return %[[T]], %arg0, %[[R]]
func.func @transposes(%x: tensor<2x3x8xf32>, %y: tensor<4x1x5xf32>)
    -> (tensor<8x2x3xf32>, tensor<2x3x8xf32>, tensor<1x4x5xf32>) {
  %0 = "nova.transpose"(%x) {permutation = array<i64: 1, 2, 0>} : (tensor<2x3x8xf32>) -> tensor<3x8x2xf32>
  %1 = "nova.transpose"(%0) {permutation = array<i64: 1, 2, 0>} : (tensor<3x8x2xf32>) -> tensor<8x2x3xf32>
  %2 = "nova.transpose"(%0) {permutation = array<i64: 2, 0, 1>} : (tensor<3x8x2xf32>) -> tensor<2x3x8xf32>
  %3 = "nova.transpose"(%y) {permutation = array<i64: 1, 0, 2>} : (tensor<4x1x5xf32>) -> tensor<1x4x5xf32>
  return %1, %2, %3 : tensor<8x2x3xf32>, tensor<2x3x8xf32>, tensor<1x4x5xf32>
}

// CHECK-LABEL: func.func @slices
// CHECK-NEXT:    %[[S:.*]] = "nova.slice"(%arg0) {limits = array<i64: 8>, starts = array<i64: 3>, strides = array<i64: 4>}
// CHECK-NEXT:    return %[[S]], %arg0
func.func @slices(%x: tensor<12xf32>) -> (tensor<2xf32>, tensor<12xf32>) {
  %0 = "nova.slice"(%x) {starts = array<i64: 1>, limits = array<i64: 12>, strides = array<i64: 2>} : (tensor<12xf32>) -> tensor<6xf32>
  %1 = "nova.slice"(%0) {starts = array<i64: 1>, limits = array<i64: 4>, strides = array<i64: 2>} : (tensor<6xf32>) -> tensor<2xf32>
  %2 = "nova.slice"(%x) {starts = array<i64: 0>, limits = array<i64: 12>, strides = array<i64: 1>} : (tensor<12xf32>) -> tensor<12xf32>
  return %1, %2 : tensor<2xf32>, tensor<12xf32>
}

// CHECK-LABEL: func.func @broadcasts
// CHECK-NEXT:    %[[B:.*]] = "nova.broadcast"(%arg0) {dims = array<i64: 1>} : (tensor<5xf32>) -> tensor<3x5x2xf32>
// CHECK-NEXT:    %[[R:.*]] = "nova.reshape"(%arg0) : (tensor<5xf32>) -> tensor<1x5x1xf32>
// CHECK-NEXT:    return %[[B]], %[[R]]
func.func @broadcasts(%x: tensor<5xf32>) -> (tensor<3x5x2xf32>, tensor<1x5x1xf32>) {
  %0 = "nova.broadcast"(%x) {dims = array<i64: 0>} : (tensor<5xf32>) -> tensor<5x2xf32>
  %1 = "nova.broadcast"(%0) {dims = array<i64: 1, 2>} : (tensor<5x2xf32>) -> tensor<3x5x2xf32>
  %2 = "nova.broadcast"(%x) {dims = array<i64: 1>} : (tensor<5xf32>) -> tensor<1x5x1xf32>
  return %1, %2 : tensor<3x5x2xf32>, tensor<1x5x1xf32>
}
