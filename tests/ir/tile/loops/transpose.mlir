// RUN: nova-opt configure tile-program
// TARGET: h200
// A transposed copy reads 16 bytes along its operand's rows and writes 16 bytes along the result's.

func.func private @k(%x: tensor<4096x1024xf32>, %y: tensor<1024x4096xf32> {nova.out}) -> tensor<1024x4096xf32>
    attributes {nova.kernel = "loops", nova.dims = array<i64: 1024, 4096>, nova.rows = array<i64>, nova.inplace = []} {
  %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0, d1)>],
      iterator_types = ["parallel", "parallel"]} ins(%x : tensor<4096x1024xf32>) outs(%y : tensor<1024x4096xf32>)
      attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: f32, %o: f32):
    linalg.yield %a : f32
  } -> tensor<1024x4096xf32>
  return %r : tensor<1024x4096xf32>
}

// CHECK: func.func @k_0(
// CHECK: "nova_tile.load"(%arg0,
// CHECK-SAME: element = array<i64: 4, 1, 4>
// CHECK-SAME: vector = 4
// CHECK: "nova_tile.to_layout"
// CHECK: "nova_tile.store"(%{{.*}}, %arg1,
// CHECK-SAME: vector = 4
