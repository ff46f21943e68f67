// RUN: nova-opt form-dispatches outline-kernels
// The variance needs the mean, though both are results of one op: what is read together with the variance (%running) is
// read after the mean was written, so only the sum may stand in its place.
func.func @step(%x: tensor<256x128xf32>, %w: tensor<128xf32>, %b: tensor<128xf32>, %running: tensor<128xf32>) -> (tensor<256x128xf32>, tensor<128xf32>, tensor<128xf32>) {
  %0:4 = "nova.batch_norm"(%x, %w, %b) {eps = 1.000000e-05 : f64} : (tensor<256x128xf32>, tensor<128xf32>, tensor<128xf32>) -> (tensor<256x128xf32>, tensor<128xf32>, tensor<128xf32>, tensor<128xf32>)
  %1 = "nova.add"(%running, %0#2) : (tensor<128xf32>, tensor<128xf32>) -> tensor<128xf32>
  return %0#0, %0#1, %1 : tensor<256x128xf32>, tensor<128xf32>, tensor<128xf32>
}
// CHECK: func.func private @batch_norm_add_0{{.*}}nova.inplace = [
// CHECK-NOT: array<i64: 3, 1>
// CHECK-SAME: array<i64: 3, 2>
