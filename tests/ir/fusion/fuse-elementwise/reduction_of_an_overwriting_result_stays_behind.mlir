// RUN: nova-opt nova-to-linalg fuse-elementwise
// Two sums over columns could share a pass, but the second needs what overwrites the operand that the first reads.
func.func private @k(%x: tensor<64x32xf32>, %y: tensor<64x32xf32>) -> (tensor<1x32xf32>, tensor<64x32xf32>, tensor<64x32xbf16>, tensor<1x32xbf16>) attributes {nova.kernel = "loops", nova.inplace = [array<i64: 0, 1>]} {
  %0 = "nova.reduce_sum"(%x) {dims = array<i64: 0>, keepdim = true} : (tensor<64x32xf32>) -> tensor<1x32xf32>
  %1 = "nova.reduce_sum"(%x) {dims = array<i64: 1>, keepdim = true} : (tensor<64x32xf32>) -> tensor<64x1xf32>
  %2 = "nova.mul"(%x, %1) : (tensor<64x32xf32>, tensor<64x1xf32>) -> tensor<64x32xf32>
  %3 = "nova.cast"(%2) : (tensor<64x32xf32>) -> tensor<64x32xbf16>
  %4 = "nova.reduce_sum"(%3) {dims = array<i64: 0>, keepdim = true} : (tensor<64x32xbf16>) -> tensor<1x32xbf16>
  return %0, %2, %3, %4 : tensor<1x32xf32>, tensor<64x32xf32>, tensor<64x32xbf16>, tensor<1x32xbf16>
}
// CHECK: linalg.generic {{.*}}iterator_types = ["reduction", "parallel"]} ins(%arg0 :
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]} ins(%arg0 :
// CHECK: [[rows:%[0-9]+]]:2 = linalg.generic {{.*}}iterator_types = ["parallel", "parallel"]} ins(%arg0,
// CHECK: linalg.generic {{.*}}iterator_types = ["reduction", "parallel"]} ins([[rows]]#1 :
