// RUN: nova-opt nova-to-linalg fuse-elementwise fold-epilogue
// Partials reduce over the columns of a tile; a tile of nothing but -inf sums to 0.
func.func private @k(%x: tensor<6x8xf32>, %w: tensor<150x8xf32>) -> (tensor<6x150xf32>, tensor<6x3xf32>, tensor<6x3xf32>)
    attributes {nova.kernel = "contraction", nova.inplace = []} {
  %0 = "nova.linear"(%x, %w) : (tensor<6x8xf32>, tensor<150x8xf32>) -> tensor<6x150xf32>
  %1:2 = "nova.sce_partials"(%0) {tile = 64 : i64} : (tensor<6x150xf32>) -> (tensor<6x3xf32>, tensor<6x3xf32>)
  return %0, %1#0, %1#1 : tensor<6x150xf32>, tensor<6x3xf32>, tensor<6x3xf32>
}
// CHECK: #[[T:.*]] = affine_map<(d0, d1) -> (d0, d1 floordiv 64)>
// CHECK: nova.contraction
// CHECK: %[[M:.*]] = linalg.generic {indexing_maps = [#{{.*}}, #[[T]]], iterator_types = ["parallel", "reduction"]}
// CHECK: arith.maximumf
// CHECK: linalg.generic {indexing_maps = [#{{.*}}, #[[T]], #[[T]]], iterator_types = ["parallel", "reduction"]}{{.*}}%[[M]]
// CHECK: arith.select
// CHECK: math.exp
// CHECK: arith.addf
