// RUN: nova-opt nova-to-linalg fuse-elementwise
// sum((x - y)^2) over a row: one generic, and its result is written where it belongs.
func.func private @k(%x: tensor<64x32xf32>, %y: tensor<64x32xf32>) -> tensor<64xf32> attributes {nova.kernel = "loops", nova.inplace = []} {
  %0 = "nova.sub"(%x, %y) : (tensor<64x32xf32>, tensor<64x32xf32>) -> tensor<64x32xf32>
  %1 = "nova.mul"(%0, %0) : (tensor<64x32xf32>, tensor<64x32xf32>) -> tensor<64x32xf32>
  %2 = "nova.reduce_sum"(%1) {dims = array<i64: 1>, keepdim = false} : (tensor<64x32xf32>) -> tensor<64xf32>
  return %2 : tensor<64xf32>
}
// CHECK: func.func private @k(%{{.*}}: tensor<64x32xf32>, %{{.*}}: tensor<64x32xf32>, %[[OUT:.*]]: tensor<64xf32> {nova.out})
// CHECK: %[[F:.*]] = linalg.fill {{.*}}outs(%[[OUT]]
// CHECK: linalg.generic {{.*}}outs(%[[F]] : tensor<64xf32>)
// CHECK: arith.subf
// CHECK-NEXT: arith.mulf
// CHECK-NEXT: arith.addf
// CHECK-NOT: linalg.generic
