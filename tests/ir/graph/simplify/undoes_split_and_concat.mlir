// RUN: nova-opt simplify
// Concatenating what was split gives the whole; slicing what was concatenated gives the piece.

// CHECK-LABEL: func.func @whole
// CHECK-NEXT:    return %arg0
func.func @whole(%x: tensor<3x5xf32>) -> tensor<3x5xf32> {
  %0 = "nova.slice"(%x) {starts = array<i64: 0, 0>, limits = array<i64: 3, 2>, strides = array<i64: 1, 1>} : (tensor<3x5xf32>) -> tensor<3x2xf32>
  %1 = "nova.slice"(%x) {starts = array<i64: 0, 2>, limits = array<i64: 3, 5>, strides = array<i64: 1, 1>} : (tensor<3x5xf32>) -> tensor<3x3xf32>
  %2 = "nova.concat"(%0, %1) {dim = 1 : i64, operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0, 0, 0>} : (tensor<3x2xf32>, tensor<3x3xf32>) -> tensor<3x5xf32>
  return %2 : tensor<3x5xf32>
}

// CHECK-LABEL: func.func @swapped
// CHECK:         nova.concat
func.func @swapped(%x: tensor<3x4xf32>) -> tensor<3x4xf32> {
  %0 = "nova.slice"(%x) {starts = array<i64: 0, 0>, limits = array<i64: 3, 2>, strides = array<i64: 1, 1>} : (tensor<3x4xf32>) -> tensor<3x2xf32>
  %1 = "nova.slice"(%x) {starts = array<i64: 0, 2>, limits = array<i64: 3, 4>, strides = array<i64: 1, 1>} : (tensor<3x4xf32>) -> tensor<3x2xf32>
  %2 = "nova.concat"(%1, %0) {dim = 1 : i64, operandSegmentSizes = array<i32: 2, 0, 0, 0, 0, 0, 0, 0>} : (tensor<3x2xf32>, tensor<3x2xf32>) -> tensor<3x4xf32>
  return %2 : tensor<3x4xf32>
}

// CHECK-LABEL: func.func @piece
// CHECK-NEXT:    %[[S:.*]] = "nova.slice"(%arg1) {limits = array<i64: 3, 2>, starts = array<i64: 0, 1>
// CHECK-NEXT:    return %arg0, %[[S]]
func.func @piece(%x: tensor<3x2xf32>, %y: tensor<3x4xf32>) -> (tensor<3x2xf32>, tensor<3x1xf32>) {
  %0 = "nova.concat"(%x, %y) {dim = 1 : i64, operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0, 0, 0>} : (tensor<3x2xf32>, tensor<3x4xf32>) -> tensor<3x6xf32>
  %1 = "nova.slice"(%0) {starts = array<i64: 0, 0>, limits = array<i64: 3, 2>, strides = array<i64: 1, 1>} : (tensor<3x6xf32>) -> tensor<3x2xf32>
  %2 = "nova.slice"(%0) {starts = array<i64: 0, 3>, limits = array<i64: 3, 4>, strides = array<i64: 1, 1>} : (tensor<3x6xf32>) -> tensor<3x1xf32>
  return %1, %2 : tensor<3x2xf32>, tensor<3x1xf32>
}
