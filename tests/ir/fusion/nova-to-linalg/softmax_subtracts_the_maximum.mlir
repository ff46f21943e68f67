// RUN: nova-opt nova-to-linalg
func.func private @k(%x: tensor<2x4x8xf32>) -> tensor<2x4x8xf32> attributes {nova.kernel = "loops", nova.inplace = [array<i64: 0, 0>]} {
  %0 = "nova.softmax"(%x) {dim = 2 : i64} : (tensor<2x4x8xf32>) -> tensor<2x4x8xf32>
  return %0 : tensor<2x4x8xf32>
}
// The two leading dims are one loop: nothing tells them apart.
// CHECK: func.func private @k(%[[X:.*]]: tensor<8x8xf32>, %[[OUT:.*]]: tensor<8x8xf32> {nova.out}) -> tensor<8x8xf32>
// CHECK-SAME: nova.dims = array<i64: 8, 8>
// CHECK-SAME: nova.rows = array<i64: 0>
// CHECK: arith.constant 0xFF800000 : f32
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "reduction"]{{.*}}dims = array<i64: 0, 1>
// CHECK: arith.maximumf
// CHECK: arith.subf
// CHECK-NEXT: math.exp
// CHECK: arith.addf
// CHECK: arith.divf
