// RUN: nova-opt configure
// Few rows against contiguous k become dot products: nothing is packed.
// CHECK: func.func private @few_rows
// CHECK-SAME: kind = "dot"
// CHECK-SAME: promoted = [false, false]
module {
  func.func private @few_rows(%a: tensor<2x128xf32>, %b: tensor<64x128xf32>, %o0: tensor<2x64xf32> {nova.out}) -> (tensor<2x64xf32>)
      attributes {nova.kernel = "contraction", nova.inplace = [],
                  nova.dims = array<i64: 2, 64, 128>} {
    %zero = arith.constant 0.0 : f32
 %empty = tensor.empty() : tensor<2x64xf32>
%init = linalg.fill ins(%zero : f32) outs(%empty : tensor<2x64xf32>) -> tensor<2x64xf32>
    %acc = linalg.generic {indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>], iterator_types = ["parallel", "parallel", "reduction"]}
        ins(%a, %b : tensor<2x128xf32>, tensor<64x128xf32>) outs(%init : tensor<2x64xf32>)
        attrs = {dims = array<i64: 0, 1, 2>, nova.contraction} {
    ^bb0(%l: f32, %r: f32, %s: f32):
      
      %m = arith.mulf %l, %r : f32
      %t = arith.addf %s, %m : f32
      linalg.yield %t : f32
    } -> tensor<2x64xf32>
    
    return %acc : tensor<2x64xf32>
  }
}
