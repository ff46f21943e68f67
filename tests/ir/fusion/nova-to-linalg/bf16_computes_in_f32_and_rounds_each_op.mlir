// RUN: nova-opt nova-to-linalg fuse-elementwise
// Two ops, two roundings: fusing them does not remove the one in between.
func.func private @k(%x: tensor<64xbf16>, %y: tensor<64xbf16>) -> tensor<64xbf16> attributes {nova.kernel = "loops", nova.inplace = []} {
  %0 = "nova.mul"(%x, %y) : (tensor<64xbf16>, tensor<64xbf16>) -> tensor<64xbf16>
  %1 = "nova.add"(%0, %y) : (tensor<64xbf16>, tensor<64xbf16>) -> tensor<64xbf16>
  return %1 : tensor<64xbf16>
}
// CHECK: linalg.generic
// CHECK: %[[P:.*]] = arith.mulf {{.*}} : f32
// CHECK: %[[R:.*]] = arith.truncf %[[P]] : f32 to bf16
// CHECK: %[[W:.*]] = arith.extf %[[R]] : bf16 to f32
// CHECK: %[[S:.*]] = arith.addf %[[W]], {{.*}} : f32
// CHECK: arith.truncf %[[S]] : f32 to bf16
// CHECK-NOT: linalg.generic
