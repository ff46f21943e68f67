// Multi-tensor kernels: the function describes the update of ONE tensor of any size; the code loops over n of them.
// Arguments marked nova.list have one pointer a tensor (0-d ones too: step counts), others are shared by all tensors.
// @step's declaration @adam_0 takes the lists flattened (all of list 0, all of list 1, ..., then shared operands in argument order).
// Generics with dims = [] are per-tensor scalars; dims = [0] runs over the elements. nova.element marks a result (foreach_norm) whose
// n values lie in one buffer.
#i = affine_map<(d0) -> (d0)>
#i0 = affine_map<(d0) -> ()>
#z = affine_map<() -> ()>
module {
  func.func private @sgd_0(%p: tensor<?xf32> {nova.list}, %g: tensor<?xf32> {nova.list}, %step: tensor<f32> {nova.list}, %lr: tensor<f64>,
      %po: tensor<?xf32> {nova.out, nova.list}, %so: tensor<f32> {nova.out, nova.list}) -> (tensor<?xf32>, tensor<f32>)
      attributes {nova.kernel = "multi_tensor", nova.dims = array<i64: -9223372036854775808>, nova.inplace = [array<i64: 0, 0>, array<i64: 2, 1>]} {
    %s = linalg.generic {indexing_maps = [#z, #z], iterator_types = []} ins(%step : tensor<f32>) outs(%so : tensor<f32>) attrs = {dims = array<i64>} {
    ^bb0(%a: f32, %o: f32):
      %one = arith.constant 1.0 : f32
      %t = arith.addf %a, %one : f32
      linalg.yield %t : f32
    } -> tensor<f32>
    %q = linalg.generic {indexing_maps = [#i, #i, #i0, #i], iterator_types = ["parallel"]}
        ins(%p, %g, %lr : tensor<?xf32>, tensor<?xf32>, tensor<f64>) outs(%po : tensor<?xf32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %b: f32, %l: f64, %o: f32):
      %lf = arith.truncf %l : f64 to f32
      %m = arith.mulf %b, %lf : f32
      %d = arith.subf %a, %m : f32
      linalg.yield %d : f32
    } -> tensor<?xf32>
    return %q, %s : tensor<?xf32>, tensor<f32>
  }
}
