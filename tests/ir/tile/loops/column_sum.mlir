// RUN: nova-opt configure tile-program
// TARGET: h200
// A sum over rows: blocks along columns and rows, a share of each in the workspace, added up in order by a second launch.

func.func private @k(%x: tensor<16384x3072xbf16>, %y: tensor<3072xf32> {nova.out}) -> tensor<3072xf32>
    attributes {nova.kernel = "loops", nova.dims = array<i64: 16384, 3072>, nova.rows = array<i64: 0>,
                nova.inplace = []} {
  %zero = arith.constant 0.0 : f32
  %f = linalg.fill ins(%zero : f32) outs(%y : tensor<3072xf32>) -> tensor<3072xf32>
  %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>],
      iterator_types = ["reduction", "parallel"]} ins(%x : tensor<16384x3072xbf16>) outs(%f : tensor<3072xf32>)
      attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: bf16, %s: f32):
    %w = arith.extf %a : bf16 to f32
    %t = arith.addf %s, %w : f32
    linalg.yield %t : f32
  } -> tensor<3072xf32>
  return %r : tensor<3072xf32>
}

// CHECK: nova_tile.workspace
// CHECK: func.func @k_0(
// CHECK: scf.for
// CHECK: "nova_tile.load"(%arg0,
// CHECK-SAME: vector = 8
// CHECK: arith.addf
// CHECK: scf.yield
// CHECK: "nova_tile.reduce_scatter"(%{{.*}}dims = array<i64: 0>, kind = "addf"
// CHECK: "nova_tile.store"(%{{.*}}, %arg2,
// CHECK: func.func @k_1(
// CHECK: "nova_tile.load"(%arg2,
// CHECK: "nova_tile.reduce_scatter"
// CHECK: "nova_tile.store"(%{{.*}}, %arg1,
