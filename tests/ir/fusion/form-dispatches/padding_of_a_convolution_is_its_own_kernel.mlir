// RUN: nova-opt form-dispatches
// The window then reads the padded image at out + tap, and the bias joins the convolution.
func.func @step(%x: tensor<2x3x8x8xf32>, %w: tensor<4x3x3x3xf32>, %b: tensor<4xf32>) -> tensor<2x4x8x8xf32> {
  %0 = "nova.convolution"(%x, %w) {stride = array<i64: 1, 1>, padding = array<i64: 1, 1>, dilation = array<i64: 1, 1>, groups = 1 : i64,
      transposed = false, output_padding = array<i64: 0, 0>} : (tensor<2x3x8x8xf32>, tensor<4x3x3x3xf32>) -> tensor<2x4x8x8xf32>
  %1 = "nova.reshape"(%b) : (tensor<4xf32>) -> tensor<4x1x1xf32>
  %2 = "nova.add"(%0, %1) : (tensor<2x4x8x8xf32>, tensor<4x1x1xf32>) -> tensor<2x4x8x8xf32>
  return %2 : tensor<2x4x8x8xf32>
}
// CHECK: nova.pad{{.*}}nova.group = 0 : i64, nova.kind = "loops"{{.*}}tensor<2x3x10x10xf32>
// CHECK: nova.convolution{{.*}}nova.group = 1 : i64, nova.kind = "contraction"{{.*}} padding = array<i64: 0, 0>
// CHECK: nova.add{{.*}}nova.group = 1
