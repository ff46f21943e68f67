// RUN: nova-opt configure
// A memory-bound kernel gets a vector width, threads and how its result is stored.
// CHECK: func.func private @double_0
// CHECK-SAME: lowering_config = {kind = "loops", nontemporal = false
// CHECK-SAME: rows_per_block =
// CHECK-SAME: threads = 1 : i64
// CHECK-SAME: vector =
#r = affine_map<(d0) -> (d0)>
module {
  func.func private @double_0(%x: tensor<1000xf32>, %y: tensor<1000xf32> {nova.out}) -> tensor<1000xf32>
      attributes {nova.kernel = "loops", nova.dims = array<i64: 1000>, nova.rows = array<i64: 0>, nova.inplace = []} {
    %0 = linalg.generic {indexing_maps = [#r, #r], iterator_types = ["parallel"]}
        ins(%x : tensor<1000xf32>) outs(%y : tensor<1000xf32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %o: f32):
      %s = arith.addf %a, %a : f32
      linalg.yield %s : f32
    } -> tensor<1000xf32>
    return %0 : tensor<1000xf32>
  }
}
