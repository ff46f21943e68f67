// RUN: nova-opt simplify
// A checkpointed region runs again for its backward: its ops do not merge with those of the forward.

// CHECK-LABEL: func.func @step
// CHECK-NEXT:    %[[A:.*]] = "nova.exp"(%arg0) : 
// CHECK-NEXT:    %[[B:.*]] = "nova.exp"(%arg0) {nova.recompute = 1 : i64}
// CHECK-NEXT:    return %[[A]], %[[B]], %[[B]]
func.func @step(%x: tensor<3xf32>) -> (tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) {
  %0 = "nova.exp"(%x) : (tensor<3xf32>) -> tensor<3xf32>
  %1 = "nova.exp"(%x) {nova.recompute = 1 : i64} : (tensor<3xf32>) -> tensor<3xf32>
  %2 = "nova.exp"(%x) {nova.recompute = 1 : i64} : (tensor<3xf32>) -> tensor<3xf32>
  return %0, %1, %2 : tensor<3xf32>, tensor<3xf32>, tensor<3xf32>
}
