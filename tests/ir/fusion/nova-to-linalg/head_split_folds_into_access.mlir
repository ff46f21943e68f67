// RUN: nova-opt nova-to-linalg
// Slice, head split and transpose of one packed buffer: two extract_slices and the contraction's maps.
func.func private @k(%qkv: tensor<2x5x24xf32>) -> tensor<2x2x5x5xf32> attributes {nova.kernel = "contraction", nova.inplace = []} {
  %0 = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 0>, limits = array<i64: 2, 5, 8>, strides = array<i64: 1, 1, 1>} : (tensor<2x5x24xf32>) -> tensor<2x5x8xf32>
  %1 = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 8>, limits = array<i64: 2, 5, 16>, strides = array<i64: 1, 1, 1>} : (tensor<2x5x24xf32>) -> tensor<2x5x8xf32>
  %2 = "nova.reshape"(%0) : (tensor<2x5x8xf32>) -> tensor<2x5x2x4xf32>
  %3 = "nova.reshape"(%1) : (tensor<2x5x8xf32>) -> tensor<2x5x2x4xf32>
  %4 = "nova.transpose"(%2) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x5x2x4xf32>) -> tensor<2x2x5x4xf32>
  %5 = "nova.transpose"(%3) {permutation = array<i64: 0, 2, 3, 1>} : (tensor<2x5x2x4xf32>) -> tensor<2x2x4x5xf32>
  %6 = "nova.matmul"(%4, %5) : (tensor<2x2x5x4xf32>, tensor<2x2x4x5xf32>) -> tensor<2x2x5x5xf32>
  return %6 : tensor<2x2x5x5xf32>
}
// CHECK-DAG: #[[Q:.*]] = affine_map<(d0, d1, d2, d3, d4) -> (d0, d2, d1, d4)>
// CHECK-DAG: #[[K:.*]] = affine_map<(d0, d1, d2, d3, d4) -> (d0, d3, d1, d4)>
// CHECK: func.func private @k(%[[QKV:.*]]: tensor<2x5x6x4xf32>, %{{.*}}: tensor<2x2x5x5xf32> {nova.out})
// CHECK: tensor.extract_slice %[[QKV]][0, 0, 0, 0] [2, 5, 2, 4] [1, 1, 1, 1]
// CHECK: tensor.extract_slice %[[QKV]][0, 0, 2, 0] [2, 5, 2, 4] [1, 1, 1, 1]
// CHECK: linalg.generic {indexing_maps = [#[[Q]], #[[K]], #{{.*}}], iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction"]}
// CHECK-SAME: nova.contraction
