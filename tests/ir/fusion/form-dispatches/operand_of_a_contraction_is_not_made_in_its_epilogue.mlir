// RUN: nova-opt form-dispatches
// The residual is what the contraction multiplies: nobody else reads it, and it must still be there before.
func.func @step(%x: tensor<64x256xf32>, %w: tensor<256x256xf32>) -> tensor<64x256xf32> {
  %h = "nova.exp"(%x) : (tensor<64x256xf32>) -> tensor<64x256xf32>
  %0 = "nova.linear"(%h, %w) : (tensor<64x256xf32>, tensor<256x256xf32>) -> tensor<64x256xf32>
  %1 = "nova.add"(%h, %0) : (tensor<64x256xf32>, tensor<64x256xf32>) -> tensor<64x256xf32>
  return %1 : tensor<64x256xf32>
}
// CHECK: nova.exp{{.*}}nova.group = 0
// CHECK: nova.linear{{.*}}nova.group = 1
// CHECK: nova.add{{.*}}nova.group = 1
