// Batched matmul q @ k^T whose operands are slices of one packed [B, T, 3, H, D] buffer: slice, head split and transpose fold into access.
// dims: 0 b, 1 h, 2 t (M), 3 s (N), 4 d (K). The same buffer may be passed for several arguments, or one argument read twice.
// A bf16 contraction has extf in the body and accumulates f32; the epilogue rounds. Here the scale and the rounding.
#a = affine_map<(b, h, t, s, d) -> (b, t, h, d)>
#b = affine_map<(b, h, t, s, d) -> (b, s, h, d)>
#c = affine_map<(b, h, t, s, d) -> (b, h, t, s)>
#o = affine_map<(b, h, t, s) -> (b, h, t, s)>
module {
  func.func private @matmul_0(%qkv: tensor<4x256x3x12x64xbf16>, %out: tensor<4x12x256x256xbf16> {nova.out}) -> tensor<4x12x256x256xbf16>
      attributes {nova.kernel = "contraction", nova.dims = array<i64: 4, 12, 256, 256, 64>, nova.inplace = []} {
    %zero = arith.constant 0.0 : f32
    %q = tensor.extract_slice %qkv[0, 0, 0, 0, 0] [4, 256, 1, 12, 64] [1, 1, 1, 1, 1] : tensor<4x256x3x12x64xbf16> to tensor<4x256x12x64xbf16>
    %k = tensor.extract_slice %qkv[0, 0, 1, 0, 0] [4, 256, 1, 12, 64] [1, 1, 1, 1, 1] : tensor<4x256x3x12x64xbf16> to tensor<4x256x12x64xbf16>
    %e = tensor.empty() : tensor<4x12x256x256xf32>
    %init = linalg.fill ins(%zero : f32) outs(%e : tensor<4x12x256x256xf32>) -> tensor<4x12x256x256xf32>
    %acc = linalg.generic {indexing_maps = [#a, #b, #c], iterator_types = ["parallel", "parallel", "parallel", "parallel", "reduction"]}
        ins(%q, %k : tensor<4x256x12x64xbf16>, tensor<4x256x12x64xbf16>) outs(%init : tensor<4x12x256x256xf32>)
        attrs = {dims = array<i64: 0, 1, 2, 3, 4>, nova.contraction} {
    ^bb0(%l: bf16, %r: bf16, %s: f32):
      %lf = arith.extf %l : bf16 to f32
      %rf = arith.extf %r : bf16 to f32
      %m = arith.mulf %lf, %rf : f32
      %t = arith.addf %s, %m : f32
      linalg.yield %t : f32
    } -> tensor<4x12x256x256xf32>
    %o = linalg.generic {indexing_maps = [#o, #o], iterator_types = ["parallel", "parallel", "parallel", "parallel"]}
        ins(%acc : tensor<4x12x256x256xf32>) outs(%out : tensor<4x12x256x256xbf16>) attrs = {dims = array<i64: 0, 1, 2, 3>} {
    ^bb0(%s: f32, %o0: bf16):
      %t = arith.truncf %s : f32 to bf16
      linalg.yield %t : bf16
    } -> tensor<4x12x256x256xbf16>
    return %o : tensor<4x12x256x256xbf16>
  }
}
