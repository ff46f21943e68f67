// RUN: nova-opt nova-to-linalg fuse-elementwise
// cat(-x2, x1) * s: the loop over the halves is gone, each half is written through its own slice, in one pass.
func.func private @k(%x: tensor<16x8xf32>, %s: tensor<16x8xf32>) -> tensor<16x8xf32> attributes {nova.kernel = "loops", nova.inplace = []} {
  %0 = "nova.slice"(%x) {starts = array<i64: 0, 4>, limits = array<i64: 16, 8>, strides = array<i64: 1, 1>} : (tensor<16x8xf32>) -> tensor<16x4xf32>
  %1 = "nova.neg"(%0) : (tensor<16x4xf32>) -> tensor<16x4xf32>
  %2 = "nova.slice"(%x) {starts = array<i64: 0, 0>, limits = array<i64: 16, 4>, strides = array<i64: 1, 1>} : (tensor<16x8xf32>) -> tensor<16x4xf32>
  %3 = "nova.concat"(%1, %2) {dim = 1 : i64, operandSegmentSizes = array<i32: 2, 0, 0, 0, 0, 0, 0, 0>} : (tensor<16x4xf32>, tensor<16x4xf32>) -> tensor<16x8xf32>
  %4 = "nova.mul"(%3, %s) : (tensor<16x8xf32>, tensor<16x8xf32>) -> tensor<16x8xf32>
  return %4 : tensor<16x8xf32>
}
// CHECK: tensor.extract_slice %{{.*}}[0, 1, 0] [16, 1, 4] [1, 1, 1] : tensor<16x2x4xf32> to tensor<16x4xf32>
// CHECK: :2 = linalg.generic
// CHECK: arith.negf
// CHECK-NOT: arith.select
// CHECK-NOT: linalg.generic
// CHECK: tensor.insert_slice
