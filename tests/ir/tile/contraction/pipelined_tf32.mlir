// RUN: nova-opt configure tile-program
// TARGET: h200
// Three tiles of k are copied ahead; fragments are loaded a step ahead and rounded; sums leave through shared memory.

func.func private @k(%a: tensor<8192x768xf32>, %b: tensor<768x3072xf32>, %o: tensor<8192x3072xf32> {nova.out})
    -> tensor<8192x3072xf32>
    attributes {nova.tf32, nova.kernel = "contraction", nova.inplace = [], nova.dims = array<i64: 8192, 3072, 768>} {
  %zero = arith.constant 0.0 : f32
  %init = linalg.fill ins(%zero : f32) outs(%o : tensor<8192x3072xf32>) -> tensor<8192x3072xf32>
  %acc = linalg.generic {indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (k, n)>,
      affine_map<(m, n, k) -> (m, n)>], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : tensor<8192x768xf32>, tensor<768x3072xf32>) outs(%init : tensor<8192x3072xf32>)
      attrs = {dims = array<i64: 0, 1, 2>, nova.contraction} {
  ^bb0(%l: f32, %r: f32, %s: f32):
    %m = arith.mulf %l, %r : f32
    %t = arith.addf %s, %m : f32
    linalg.yield %t : f32
  } -> tensor<8192x3072xf32>
  return %acc : tensor<8192x3072xf32>
}

// CHECK: nova_tile.workspace = 0
// CHECK: func.func @k_main(
// CHECK-SAME: nova_tile.threads = 256 : i64
// CHECK: %[[A:.*]] = "nova_tile.alloc_shared"() {swizzle = "xor"} : () -> memref<4x256x32xf32, 3>
// CHECK: %[[B:.*]] = "nova_tile.alloc_shared"() {swizzle = "xor"} : () -> memref<4x32x128xf32, 3>
// CHECK: "nova_tile.async_copy"(%arg0, %[[A]],
// CHECK-SAME: vector = 4 : i64
// CHECK: "nova_tile.async_copy"(%arg1, %[[B]],
// CHECK: "nova_tile.async_wait"() {pending = 2 : i64}
// CHECK: "nova_tile.barrier"
// CHECK: "nova_tile.load_shared"(%[[A]],
// CHECK-SAME: transposed = false
// CHECK: "nova_tile.load_shared"(%[[B]],
// CHECK-SAME: transposed = false
// CHECK: scf.for
// CHECK: "nova_tile.load_shared"(%[[A]],
// CHECK: "nova_tile.async_copy"(%arg0, %[[A]],
// CHECK: "nova_tile.async_commit"
// CHECK: "nova_tile.round_tf32"
// CHECK: "nova_tile.mma"
// CHECK-SAME: MMA_SYNC_TF32_16x8x8
// CHECK: scf.yield
// CHECK: "nova_tile.alloc_shared"() {swizzle = "xor"} : () -> memref<1x256x128xf32, 3>
// CHECK: "nova_tile.store_shared"
// CHECK: "nova_tile.store"({{.*}}, %arg2,
// CHECK-SAME: vector = 4 : i64
