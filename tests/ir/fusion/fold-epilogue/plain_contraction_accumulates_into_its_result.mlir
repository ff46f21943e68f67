// RUN: nova-opt nova-to-linalg fuse-elementwise fold-epilogue
func.func private @k(%x: tensor<6x8xf32>, %w: tensor<8x16xf32>) -> tensor<6x16xf32> attributes {nova.kernel = "contraction", nova.inplace = []} {
  %0 = "nova.matmul"(%x, %w) : (tensor<6x8xf32>, tensor<8x16xf32>) -> tensor<6x16xf32>
  return %0 : tensor<6x16xf32>
}
// CHECK: func.func private @k(%{{.*}}, %{{.*}}, %[[OUT:.*]]: tensor<6x16xf32> {nova.out})
// CHECK: %[[F:.*]] = linalg.fill {{.*}}outs(%[[OUT]]
// CHECK: %[[R:.*]] = linalg.generic {{.*}}outs(%[[F]] : tensor<6x16xf32>){{.*}}nova.contraction
// CHECK: return %[[R]]
