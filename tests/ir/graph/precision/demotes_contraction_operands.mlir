// RUN: nova-opt precision
// Operands of contractions become bf16, each value cast once; bias, result and everything else stay f32.

// CHECK-LABEL: func.func @step
// CHECK-NEXT:    %[[X:.*]] = "nova.cast"(%arg0) : (tensor<3x5xf32>) -> tensor<3x5xbf16>
// CHECK-NEXT:    %[[W:.*]] = "nova.cast"(%arg1) : (tensor<7x5xf32>) -> tensor<7x5xbf16>
// CHECK-NEXT:    %[[Y:.*]] = "nova.linear"(%[[X]], %[[W]], %arg2) : (tensor<3x5xbf16>, tensor<7x5xbf16>, tensor<7xf32>) -> tensor<3x7xf32>
// CHECK-NEXT:    %[[G:.*]] = "nova.gelu"(%[[Y]]) {approximate = "none"} : (tensor<3x7xf32>) -> tensor<3x7xf32>
// CHECK-NEXT:    %[[H:.*]] = "nova.cast"(%[[G]]) : (tensor<3x7xf32>) -> tensor<3x7xbf16>
// CHECK-NEXT:    %[[Z:.*]] = "nova.matmul"(%[[H]], %[[W]]) : (tensor<3x7xbf16>, tensor<7x5xbf16>) -> tensor<3x5xf32>
// CHECK-NEXT:    return %[[Y]], %[[Z]]
module attributes {nova.precision = "bf16"} {
  func.func @step(%x: tensor<3x5xf32>, %w: tensor<7x5xf32>, %b: tensor<7xf32>) -> (tensor<3x7xf32>, tensor<3x5xf32>) {
    %0 = "nova.linear"(%x, %w, %b) : (tensor<3x5xf32>, tensor<7x5xf32>, tensor<7xf32>) -> tensor<3x7xf32>
    %1 = "nova.gelu"(%0) {approximate = "none"} : (tensor<3x7xf32>) -> tensor<3x7xf32>
    %2 = "nova.matmul"(%1, %w) : (tensor<3x7xf32>, tensor<7x5xf32>) -> tensor<3x5xf32>
    return %0, %2 : tensor<3x7xf32>, tensor<3x5xf32>
  }
}
