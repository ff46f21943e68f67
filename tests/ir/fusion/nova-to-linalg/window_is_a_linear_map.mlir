// RUN: nova-opt nova-to-linalg
// A convolution with stride 2 and dilation 3 reads x[n, c, 2*p + 3*r].
func.func private @k(%x: tensor<2x3x21xf32>, %w: tensor<4x3x5xf32>) -> tensor<2x4x5xf32> attributes {nova.kernel = "contraction", nova.inplace = []} {
  %0 = "nova.convolution"(%x, %w) {stride = array<i64: 2>, padding = array<i64: 0>, dilation = array<i64: 3>, groups = 1 : i64,
      transposed = false, output_padding = array<i64: 0>} : (tensor<2x3x21xf32>, tensor<4x3x5xf32>) -> tensor<2x4x5xf32>
  return %0 : tensor<2x4x5xf32>
}
// CHECK: affine_map<(d0, d1, d2, d3, d4) -> (d0, d3, d2 * 2 + d4 * 3)>
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "parallel", "parallel", "reduction", "reduction"]
