// RUN: nova-opt nova-to-linalg fuse-elementwise
// Both column sums and both row sums of layer norm's backward are one generic each.
func.func private @k(%dy: tensor<64x32xf32>, %x: tensor<64x32xf32>, %m: tensor<64x1xf32>, %r: tensor<64x1xf32>, %w: tensor<32xf32>)
    -> (tensor<64x32xf32>, tensor<32xf32>, tensor<32xf32>) attributes {nova.kernel = "loops", nova.inplace = [array<i64: 0, 0>]} {
  %0:3 = "nova.layer_norm_backward"(%dy, %x, %m, %r, %w) {axes = 1 : i64}
      : (tensor<64x32xf32>, tensor<64x32xf32>, tensor<64x1xf32>, tensor<64x1xf32>, tensor<32xf32>) -> (tensor<64x32xf32>, tensor<32xf32>, tensor<32xf32>)
  return %0#0, %0#1, %0#2 : tensor<64x32xf32>, tensor<32xf32>, tensor<32xf32>
}
// CHECK: :2 = linalg.generic {{.*}}iterator_types = ["reduction", "parallel"]
// CHECK: :2 = linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]
// dx overwrites dy, so it comes last.
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "parallel"]
// CHECK-NOT: linalg.generic
