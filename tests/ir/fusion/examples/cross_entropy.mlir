// Cross entropy forward, mean over the labels that count: row max, row sum of exponentials, per-row loss, a cross-row sum of
// (loss, weight), then an "after" generic without loops (dims = []) that divides.
#xy = affine_map<(d0, d1) -> (d0, d1)>
#x_ = affine_map<(d0, d1) -> (d0)>
#r = affine_map<(d0) -> (d0)>
#s = affine_map<(d0) -> ()>
#z = affine_map<() -> ()>
module {
  func.func private @sce_0(%x: tensor<8192x50304xf32>, %t: tensor<8192xi64>, %loss: tensor<f32> {nova.out}, %lse: tensor<8192xf32> {nova.out})
      -> (tensor<f32>, tensor<8192xf32>)
      attributes {nova.kernel = "loops", nova.dims = array<i64: 8192, 50304>, nova.rows = array<i64: 0>, nova.inplace = [],
                  nova.raises = "IndexError: Target {value} is out of bounds."} {
    %ninf = arith.constant 0xFF800000 : f32
    %zero = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<8192xf32>
    %e1 = tensor.empty() : tensor<f32>
    %f0 = linalg.fill ins(%ninf : f32) outs(%e : tensor<8192xf32>) -> tensor<8192xf32>
    %mx = linalg.generic {indexing_maps = [#xy, #x_], iterator_types = ["parallel", "reduction"]}
        ins(%x : tensor<8192x50304xf32>) outs(%f0 : tensor<8192xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%a: f32, %acc: f32):
      %v = arith.maximumf %acc, %a : f32
      linalg.yield %v : f32
    } -> tensor<8192xf32>
    %f1 = linalg.fill ins(%zero : f32) outs(%e : tensor<8192xf32>) -> tensor<8192xf32>
    %sum = linalg.generic {indexing_maps = [#xy, #x_, #x_], iterator_types = ["parallel", "reduction"]}
        ins(%x, %mx : tensor<8192x50304xf32>, tensor<8192xf32>) outs(%f1 : tensor<8192xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%a: f32, %m: f32, %acc: f32):
      %d = arith.subf %a, %m : f32
      %ex = math.exp %d : f32
      %v = arith.addf %acc, %ex : f32
      linalg.yield %v : f32
    } -> tensor<8192xf32>
    %l:2 = linalg.generic {indexing_maps = [#r, #r, #r, #r, #r], iterator_types = ["parallel"]}
        ins(%mx, %sum, %t : tensor<8192xf32>, tensor<8192xf32>, tensor<8192xi64>) outs(%lse, %e : tensor<8192xf32>, tensor<8192xf32>)
        attrs = {dims = array<i64: 0>} {
    ^bb0(%m: f32, %s: f32, %i: i64, %o0: f32, %o1: f32):
      %c0 = arith.constant 0 : i64
      %c1 = arith.constant 50303 : i64
      %ign = arith.constant -100 : i64
      %fz = arith.constant 0.0 : f32
      %lg = math.log %s : f32
      %ls = arith.addf %lg, %m : f32
      %n = arith.constant 50304 : i64
      %use = arith.cmpi ne, %i, %ign : i64
      %oob = arith.cmpi uge, %i, %n : i64
      %bad = arith.andi %oob, %use : i1
      "nova.check"(%bad, %i) : (i1, i64) -> ()
      %i0 = arith.maxsi %i, %c0 : i64
      %i1 = arith.minsi %i0, %c1 : i64
      %col = arith.index_cast %i1 : i64 to index
      %row = linalg.index 0 : index
      %xv = tensor.extract %x[%row, %col] : tensor<8192x50304xf32>
      %nll = arith.subf %ls, %xv : f32
      %v = arith.select %use, %nll, %fz : f32
      linalg.yield %ls, %v : f32, f32
    } -> (tensor<8192xf32>, tensor<8192xf32>)
    %f2 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<f32>) -> tensor<f32>
    %f3 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<f32>) -> tensor<f32>
    %tot:2 = linalg.generic {indexing_maps = [#r, #r, #s, #s], iterator_types = ["reduction"]}
        ins(%l#1, %t : tensor<8192xf32>, tensor<8192xi64>) outs(%f2, %f3 : tensor<f32>, tensor<f32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %i: i64, %acc: f32, %cnt: f32):
      %ign = arith.constant -100 : i64
      %use = arith.cmpi ne, %i, %ign : i64
      %one = arith.uitofp %use : i1 to f32
      %o0 = arith.addf %acc, %a : f32
      %o1 = arith.addf %cnt, %one : f32
      linalg.yield %o0, %o1 : f32, f32
    } -> (tensor<f32>, tensor<f32>)
    %res = linalg.generic {indexing_maps = [#z, #z, #z], iterator_types = []}
        ins(%tot#0, %tot#1 : tensor<f32>, tensor<f32>) outs(%loss : tensor<f32>) attrs = {dims = array<i64>} {
    ^bb0(%a: f32, %b: f32, %o: f32):
      %d = arith.divf %a, %b : f32
      linalg.yield %d : f32
    } -> tensor<f32>
    return %res, %l#0 : tensor<f32>, tensor<8192xf32>
  }
}
