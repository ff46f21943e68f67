// RUN: nova-opt form-dispatches outline-kernels
// Two layers of one shape: one kernel, called twice; its declaration carries what the memory plan needs.
func.func @step(%x: tensor<6x8xf32> {nova.role = "arg"}, %w: tensor<8x8xf32>, %v: tensor<8x8xf32>) -> tensor<6x8xf32> {
  %0 = "nova.linear"(%x, %w) : (tensor<6x8xf32>, tensor<8x8xf32>) -> tensor<6x8xf32>
  %1 = "nova.relu"(%0) : (tensor<6x8xf32>) -> tensor<6x8xf32>
  %2 = "nova.linear"(%1, %v) : (tensor<6x8xf32>, tensor<8x8xf32>) -> tensor<6x8xf32>
  %3 = "nova.relu"(%2) : (tensor<6x8xf32>) -> tensor<6x8xf32>
  return %3 : tensor<6x8xf32>
}
// CHECK: func.func private @linear_relu_0(tensor<6x8xf32>, tensor<8x8xf32>) -> tensor<6x8xf32> attributes {nova.inplace = [], nova.kernel = "contraction"}
// CHECK: func.func @step(%[[X:.*]]: tensor<6x8xf32> {nova.role = "arg"}, %[[W:.*]]: tensor<8x8xf32>, %[[V:.*]]: tensor<8x8xf32>)
// CHECK-NEXT: %[[A:.*]] = call @linear_relu_0(%[[X]], %[[W]])
// CHECK-NEXT: %[[B:.*]] = call @linear_relu_0(%[[A]], %[[V]])
// CHECK-NEXT: return %[[B]]
// CHECK: module @kernels
// CHECK: func.func private @linear_relu_0
// CHECK: nova.linear
// CHECK: nova.relu
// CHECK-NOT: func.func
