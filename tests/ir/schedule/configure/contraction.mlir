// RUN: nova-opt configure
// A contraction kernel gets its tiles, its reasons and its predicted time; nothing else changes.
// CHECK: func.func private @linear_0
// CHECK-SAME: lowering_config = {
// CHECK-SAME: kind = "tiled"
// CHECK-SAME: predicted_seconds =
// CHECK-SAME: reasons = ["register tile
// CHECK-SAME: subgroup = array<i64:
// CHECK-SAME: workgroup = array<i64:
// CHECK-SAME: nova.dims = array<i64: 256, 64, 128>
// CHECK: linalg.generic
// CHECK: nova.contraction
module {
  func.func private @linear_0(%a: tensor<256x128xf32>, %b: tensor<64x128xf32>, %e0: tensor<64xf32>, %o0: tensor<256x64xf32> {nova.out}) -> (tensor<256x64xf32>)
      attributes {nova.kernel = "contraction", nova.inplace = [],
                  nova.dims = array<i64: 256, 64, 128>} {
    %zero = arith.constant 0.0 : f32
 %empty = tensor.empty() : tensor<256x64xf32>
%init = linalg.fill ins(%zero : f32) outs(%empty : tensor<256x64xf32>) -> tensor<256x64xf32>
    %acc = linalg.generic {indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>], iterator_types = ["parallel", "parallel", "reduction"]}
        ins(%a, %b : tensor<256x128xf32>, tensor<64x128xf32>) outs(%init : tensor<256x64xf32>)
        attrs = {dims = array<i64: 0, 1, 2>, nova.contraction} {
    ^bb0(%l: f32, %r: f32, %s: f32):
      
      %m = arith.mulf %l, %r : f32
      %t = arith.addf %s, %m : f32
      linalg.yield %t : f32
    } -> tensor<256x64xf32>
    %res = linalg.generic {indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (n)>, affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}
        ins(%acc, %e0 : tensor<256x64xf32>, tensor<64xf32>) outs(%o0 : tensor<256x64xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%s: f32, %r0: f32, %d0: f32):
      %y0 = arith.addf %s, %r0 : f32
      linalg.yield %y0 : f32
    } -> (tensor<256x64xf32>)
    return %res : tensor<256x64xf32>
  }
}
