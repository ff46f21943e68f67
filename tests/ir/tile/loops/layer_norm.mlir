// RUN: nova-opt configure tile-program
// TARGET: h200
// One warp a row: the row stays in registers for both statistics and for the result, in 16-byte accesses without bounds.

#full = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
#one = affine_map<(d0) -> (d0)>
func.func private @k(%x: tensor<16384x768xf32>, %y: tensor<16384x768xf32> {nova.out}) -> tensor<16384x768xf32>
    attributes {nova.kernel = "loops", nova.dims = array<i64: 16384, 768>, nova.rows = array<i64: 0>,
                nova.inplace = [array<i64: 0, 0>]} {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<16384xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<16384xf32>) -> tensor<16384xf32>
  %sum = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<16384x768xf32>) outs(%f : tensor<16384xf32>) attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: f32, %s: f32):
    %t = arith.addf %s, %a : f32
    linalg.yield %t : f32
  } -> tensor<16384xf32>
  %mean = linalg.generic {indexing_maps = [#one, #one], iterator_types = ["parallel"]}
      ins(%sum : tensor<16384xf32>) outs(%e : tensor<16384xf32>) attrs = {dims = array<i64: 0>} {
  ^bb0(%s: f32, %o: f32):
    %n = arith.constant 768.0 : f32
    %m = arith.divf %s, %n : f32
    linalg.yield %m : f32
  } -> tensor<16384xf32>
  %squares = linalg.generic {indexing_maps = [#full, #row, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x, %mean : tensor<16384x768xf32>, tensor<16384xf32>) outs(%f : tensor<16384xf32>)
      attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: f32, %m: f32, %s: f32):
    %d = arith.subf %a, %m : f32
    %q = arith.mulf %d, %d : f32
    %t = arith.addf %s, %q : f32
    linalg.yield %t : f32
  } -> tensor<16384xf32>
  %r = linalg.generic {indexing_maps = [#full, #row, #row, #full], iterator_types = ["parallel", "parallel"]}
      ins(%x, %mean, %squares : tensor<16384x768xf32>, tensor<16384xf32>, tensor<16384xf32>)
      outs(%y : tensor<16384x768xf32>) attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: f32, %m: f32, %v: f32, %o: f32):
    %d = arith.subf %a, %m : f32
    %w = math.rsqrt %v : f32
    %p = arith.mulf %d, %w : f32
    linalg.yield %p : f32
  } -> tensor<16384x768xf32>
  return %r : tensor<16384x768xf32>
}

// CHECK: func.func @k_0({{.*}}nova_tile.grid = array<i64: 4096, 1, 1>
// CHECK-COUNT-1: "nova_tile.load"(%arg0,
// CHECK-SAME: extents = array<i64: -1, -1, -1>
// CHECK-SAME: subgroup = array<i64: 4, 1, 1>
// CHECK-SAME: vector = 4
// CHECK-NOT: "nova_tile.load"
// CHECK: "nova_tile.reduce"
// CHECK: arith.divf %{{.*}} : vector<4xf32>
// CHECK: "nova_tile.reduce"
// CHECK: math.rsqrt %{{.*}} : vector<4xf32>
// CHECK: "nova_tile.store"(%{{.*}}, %arg1,
