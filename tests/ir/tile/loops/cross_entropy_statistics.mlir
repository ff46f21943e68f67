// RUN: nova-opt configure tile-program
// TARGET: h200
// A row of 50304: one loop over it keeps the maximum and the sum of exponentials relative to it, and a ragged rest.

#full = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>
func.func private @k(%x: tensor<512x50304xf32>, %m: tensor<512xf32> {nova.out}, %s: tensor<512xf32> {nova.out})
    -> (tensor<512xf32>, tensor<512xf32>)
    attributes {nova.kernel = "loops", nova.dims = array<i64: 512, 50304>, nova.rows = array<i64: 0>,
                nova.inplace = []} {
  %low = arith.constant 0xFF800000 : f32
  %zero = arith.constant 0.0 : f32
  %f = linalg.fill ins(%low : f32) outs(%m : tensor<512xf32>) -> tensor<512xf32>
  %g = linalg.fill ins(%zero : f32) outs(%s : tensor<512xf32>) -> tensor<512xf32>
  %top = linalg.generic {indexing_maps = [#full, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<512x50304xf32>) outs(%f : tensor<512xf32>) attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: f32, %o: f32):
    %t = arith.maximumf %o, %a : f32
    linalg.yield %t : f32
  } -> tensor<512xf32>
  %sum = linalg.generic {indexing_maps = [#full, #row, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x, %top : tensor<512x50304xf32>, tensor<512xf32>) outs(%g : tensor<512xf32>)
      attrs = {dims = array<i64: 0, 1>} {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %d = arith.subf %a, %b : f32
    %p = math.exp %d : f32
    %t = arith.addf %o, %p : f32
    linalg.yield %t : f32
  } -> tensor<512xf32>
  return %top, %sum : tensor<512xf32>, tensor<512xf32>
}

// CHECK: func.func @k_0({{.*}}nova_tile.grid = array<i64: 512, 1, 1>
// CHECK: scf.for {{.*}} iter_args
// CHECK: "nova_tile.load"(%arg0,
// CHECK-SAME: extents = array<i64: -1, -1, -1>
// CHECK: math.exp2 {{.*}} fastmath<afn>
// CHECK: scf.yield
// CHECK: "nova_tile.load"(%arg0,
// CHECK-SAME: extents = array<i64: -1, -1>
// CHECK: "nova_tile.load"(%arg0,
// CHECK-SAME: extents = array<i64: 12576, -1>
// CHECK: "nova_tile.store_scalar"(%{{.*}}, %arg1,
// CHECK: "nova_tile.store_scalar"(%{{.*}}, %arg2,
// CHECK-NOT: scf.for
