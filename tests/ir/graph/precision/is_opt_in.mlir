// RUN: nova-opt precision
// Without precision="bf16" nothing changes.

// CHECK-LABEL: func.func @step
// CHECK-NEXT:    %[[Y:.*]] = "nova.linear"(%arg0, %arg0) : (tensor<3x5xf32>, tensor<3x5xf32>) -> tensor<3x3xf32>
// CHECK-NEXT:    return %[[Y]]
func.func @step(%x: tensor<3x5xf32>) -> tensor<3x3xf32> {
  %0 = "nova.linear"(%x, %x) : (tensor<3x5xf32>, tensor<3x5xf32>) -> tensor<3x3xf32>
  return %0 : tensor<3x3xf32>
}
