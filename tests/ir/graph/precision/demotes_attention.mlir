// RUN: nova-opt precision
// q, k, v and dout are contracted; the mask, the log-sum-exp and the results stay f32.

// CHECK-LABEL: func.func @step
// CHECK-COUNT-3: "nova.cast"({{.*}} -> tensor<1x2x3x4xbf16>
// CHECK:         "nova.attention"({{.*}}) {{.*}} : (tensor<1x2x3x4xbf16>, tensor<1x2x3x4xbf16>, tensor<1x2x3x4xbf16>, tensor<3x3xf32>) -> (tensor<1x2x3x4xf32>, tensor<1x2x3xf32>)
// CHECK-NEXT:    return
module attributes {nova.precision = "bf16"} {
  func.func @step(%q: tensor<1x2x3x4xf32>, %k: tensor<1x2x3x4xf32>, %v: tensor<1x2x3x4xf32>, %m: tensor<3x3xf32>) -> tensor<1x2x3x4xf32> {
    %0:2 = "nova.attention"(%q, %k, %v, %m) {has_mask = true, has_seed = false, causal = false, scale = 0.5, dropout_p = 0.0, stream = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<1x2x3x4xf32>, tensor<1x2x3x4xf32>, tensor<1x2x3x4xf32>, tensor<3x3xf32>) -> (tensor<1x2x3x4xf32>, tensor<1x2x3xf32>)
    return %0#0 : tensor<1x2x3x4xf32>
  }
}
