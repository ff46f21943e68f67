// Embedding + position embedding: rows gathered with tensor.extract. The table is a whole-tensor operand captured by the region
// (never an `ins` operand). A first generic over the ids alone reports bad indices (nova.check stores to the error record; the function
// has `nova.raises`) and clamps them into a per-row scalar, so the read is always in bounds.
#el = affine_map<(t, c) -> (t, c)>
#row = affine_map<(t, c) -> (t)>
#t = affine_map<(t) -> (t)>
module {
  func.func private @take_add_0(%table: tensor<50304x768xf32>, %ids: tensor<8192xi64>, %pos: tensor<8192x768xf32>,
      %out: tensor<8192x768xf32> {nova.out}) -> tensor<8192x768xf32>
      attributes {nova.kernel = "loops", nova.dims = array<i64: 8192, 768>, nova.rows = array<i64: 0>, nova.inplace = [array<i64: 2, 0>],
                  nova.raises = "IndexError: index {value} is out of range for dimension 0 with size 50304"} {
    %e = tensor.empty() : tensor<8192xi64>
    %safe = linalg.generic {indexing_maps = [#t, #t], iterator_types = ["parallel"]}
        ins(%ids : tensor<8192xi64>) outs(%e : tensor<8192xi64>) attrs = {dims = array<i64: 0>} {
    ^bb0(%i: i64, %o: i64):
      %lo = arith.constant 0 : i64
      %n = arith.constant 50304 : i64
      %hi = arith.constant 50303 : i64
      %bad = arith.cmpi uge, %i, %n : i64
      "nova.check"(%bad, %i) : (i1, i64) -> ()
      %i0 = arith.maxsi %i, %lo : i64
      %i1 = arith.minsi %i0, %hi : i64
      linalg.yield %i1 : i64
    } -> tensor<8192xi64>
    %o = linalg.generic {indexing_maps = [#row, #el, #el], iterator_types = ["parallel", "parallel"]}
        ins(%safe, %pos : tensor<8192xi64>, tensor<8192x768xf32>) outs(%out : tensor<8192x768xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%i: i64, %p: f32, %d: f32):
      %r = arith.index_cast %i : i64 to index
      %c = linalg.index 1 : index
      %x = tensor.extract %table[%r, %c] : tensor<50304x768xf32>
      %s = arith.addf %x, %p : f32
      linalg.yield %s : f32
    } -> tensor<8192x768xf32>
    return %o : tensor<8192x768xf32>
  }
}
