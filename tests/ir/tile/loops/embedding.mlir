// RUN: nova-opt configure tile-program
// TARGET: h200
// Rows picked by index: one index a row, 16 bytes an access; a bad index is reported.

func.func private @k(%table: tensor<50304x768xf32>, %ids: tensor<8192xi64>, %y: tensor<8192x768xf32> {nova.out})
    -> tensor<8192x768xf32> attributes {nova.kernel = "loops", nova.dims = array<i64: 8192, 768>,
    nova.rows = array<i64>, nova.inplace = [], nova.raises = "IndexError: {value}"} {
  %e = tensor.empty() : tensor<8192xi64>
  %safe = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>],
      iterator_types = ["parallel"]} ins(%ids : tensor<8192xi64>) outs(%e : tensor<8192xi64>)
      attrs = {dims = array<i64: 0>} {
  ^bb0(%i: i64, %o: i64):
    %low = arith.constant 0 : i64
    %high = arith.constant 50303 : i64
    %count = arith.constant 50304 : i64
    %bad = arith.cmpi uge, %i, %count : i64
    "nova.check"(%bad, %i) : (i1, i64) -> ()
    %c = arith.maxsi %i, %low : i64
    %d = arith.minsi %c, %high : i64
    linalg.yield %d : i64
  } -> tensor<8192xi64>
  %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>],
      iterator_types = ["parallel", "parallel"]} ins(%safe : tensor<8192xi64>) outs(%y : tensor<8192x768xf32>)
      attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%i: i64, %o: f32):
    %n = arith.index_cast %i : i64 to index
    %c = linalg.index 1 : index
    %v = tensor.extract %table[%n, %c] : tensor<50304x768xf32>
    linalg.yield %v : f32
  } -> tensor<8192x768xf32>
  return %r : tensor<8192x768xf32>
}

// CHECK: func.func @k_0(
// CHECK: "nova_tile.load"(%arg1,
// CHECK: "nova_tile.check"
// CHECK-SAME: %arg4
// CHECK: "nova_tile.gather"(%arg0,
// CHECK-SAME: vector = 4
// CHECK: "nova_tile.store"(%{{.*}}, %arg2,
