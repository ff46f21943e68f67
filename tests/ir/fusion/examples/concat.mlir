// concat of unequal pieces along the last dim, with the elementwise producer of a piece fused: one generic a piece, each writing
// its own slice of the destination. Pieces are independent; dims 1 and 2 are the two pieces' own loops.
#p = affine_map<(d0, d1) -> (d0, d1)>
module {
  func.func private @concat_0(%a: tensor<512x96xf32>, %b: tensor<512x160xf32>, %out: tensor<512x256xf32> {nova.out}) -> tensor<512x256xf32>
      attributes {nova.kernel = "loops", nova.dims = array<i64: 512, 96, 160>, nova.rows = array<i64: 0>, nova.inplace = []} {
    %d0 = tensor.extract_slice %out[0, 0] [512, 96] [1, 1] : tensor<512x256xf32> to tensor<512x96xf32>
    %p0 = linalg.generic {indexing_maps = [#p, #p], iterator_types = ["parallel", "parallel"]}
        ins(%a : tensor<512x96xf32>) outs(%d0 : tensor<512x96xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%x: f32, %o: f32):
      %n = arith.negf %x : f32
      linalg.yield %n : f32
    } -> tensor<512x96xf32>
    %o0 = tensor.insert_slice %p0 into %out[0, 0] [512, 96] [1, 1] : tensor<512x96xf32> into tensor<512x256xf32>
    %d1 = tensor.extract_slice %o0[0, 96] [512, 160] [1, 1] : tensor<512x256xf32> to tensor<512x160xf32>
    %p1 = linalg.generic {indexing_maps = [#p, #p], iterator_types = ["parallel", "parallel"]}
        ins(%b : tensor<512x160xf32>) outs(%d1 : tensor<512x160xf32>) attrs = {dims = array<i64: 0, 2>} {
    ^bb0(%x: f32, %o: f32):
      linalg.yield %x : f32
    } -> tensor<512x160xf32>
    %o1 = tensor.insert_slice %p1 into %o0[0, 96] [512, 160] [1, 1] : tensor<512x160xf32> into tensor<512x256xf32>
    return %o1 : tensor<512x256xf32>
  }
}
