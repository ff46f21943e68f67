// RUN: nova-opt nova-to-linalg fuse-elementwise
// The elements in f32, the step size from f64 once a tensor; no weight decay leaves the gradient alone even if p is infinite.
func.func private @k(%p: tensor<2xf32> {nova.list}, %g: tensor<2xf32> {nova.list}, %lr: tensor<f64>, %z: tensor<f64>) -> (tensor<2xf32> {nova.list})
    attributes {nova.kernel = "multi_tensor", nova.inplace = [array<i64: 0, 0>]} {
  %0 = "nova.sgd"(%p, %g, %lr, %z, %z, %z) {nesterov = false, maximize = false, has_buf = false, has_first = false, has_found_inf = false,
      operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0>}
      : (tensor<2xf32>, tensor<2xf32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
// CHECK: func.func private @k(%{{.*}}: tensor<?xf32> {nova.list}, %{{.*}}: tensor<?xf32> {nova.list}, %{{.*}}: tensor<f64>, %{{.*}}: tensor<f64>, %[[OUT:.*]]: tensor<?xf32> {nova.list, nova.out})
// CHECK: iterator_types = []
// CHECK: arith.truncf %{{.*}} : f64 to f32
// CHECK: iterator_types = ["parallel"]{{.*}}outs(%[[OUT]] : tensor<?xf32>)
// CHECK: arith.select
// CHECK: arith.subf
