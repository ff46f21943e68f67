// RUN: nova-opt nova-to-linalg fuse-elementwise fold-epilogue
// The pre-activation and the activation leave the tile together.
func.func private @k(%x: tensor<6x8xf32>, %w: tensor<16x8xf32>, %b: tensor<16xf32>) -> (tensor<6x16xf32>, tensor<6x16xf32>)
    attributes {nova.kernel = "contraction", nova.inplace = []} {
  %0 = "nova.linear"(%x, %w, %b) : (tensor<6x8xf32>, tensor<16x8xf32>, tensor<16xf32>) -> tensor<6x16xf32>
  %1 = "nova.relu"(%0) : (tensor<6x16xf32>) -> tensor<6x16xf32>
  return %0, %1 : tensor<6x16xf32>, tensor<6x16xf32>
}
// CHECK: %[[ACC:.*]] = linalg.generic {{.*}}nova.contraction
// CHECK: %[[R:.*]]:2 = linalg.generic {{.*}}ins(%[[ACC]], %{{.*}} : tensor<6x16xf32>, tensor<16xf32>)
// CHECK: %[[P:.*]] = arith.addf
// CHECK: %[[A:.*]] = arith.maximumf %[[P]]
// CHECK: linalg.yield %[[P]], %[[A]]
// CHECK-NOT: linalg.generic
// CHECK: return %[[R]]#0, %[[R]]#1
