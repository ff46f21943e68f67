// RUN: nova-opt nova-to-linalg fuse-elementwise
// exp(x - max) is needed by the sum and by the quotient: computed once. x - max is cheap: inlined.
func.func private @k(%x: tensor<64x32xf32>) -> tensor<64x32xf32> attributes {nova.kernel = "loops", nova.inplace = []} {
  %0 = "nova.softmax"(%x) {dim = 1 : i64} : (tensor<64x32xf32>) -> tensor<64x32xf32>
  return %0 : tensor<64x32xf32>
}
// CHECK-COUNT-4: linalg.generic
// CHECK-NOT: linalg.generic
