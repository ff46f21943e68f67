// RUN: nova-opt form-dispatches
// What autocast does to the weights and biases of a model: nothing but contractions reads the results. A cast that an
// elementwise op reads is not one of them.
func.func @step(%x: tensor<4x8xbf16>, %w: tensor<6x8xf32>, %b: tensor<6xf32>, %v: tensor<5x6xf32>, %s: tensor<5xf32>) -> tensor<4x5xbf16> {
  %0 = "nova.cast"(%w) : (tensor<6x8xf32>) -> tensor<6x8xbf16>
  %1 = "nova.cast"(%b) : (tensor<6xf32>) -> tensor<6xbf16>
  %2 = "nova.linear"(%x, %0, %1) {has_bias = true} : (tensor<4x8xbf16>, tensor<6x8xbf16>, tensor<6xbf16>) -> tensor<4x6xbf16>
  %3 = "nova.cast"(%v) : (tensor<5x6xf32>) -> tensor<5x6xbf16>
  %4 = "nova.linear"(%2, %3) {has_bias = false} : (tensor<4x6xbf16>, tensor<5x6xbf16>) -> tensor<4x5xbf16>
  %5 = "nova.cast"(%s) : (tensor<5xf32>) -> tensor<5xbf16>
  %6 = "nova.add"(%4, %5) : (tensor<4x5xbf16>, tensor<5xbf16>) -> tensor<4x5xbf16>
  return %6 : tensor<4x5xbf16>
}
// CHECK: nova.cast"(%arg1) {nova.group = 0 : i64, nova.kind = "multi_tensor"}
// CHECK: nova.cast"(%arg2) {nova.group = 0
// CHECK: nova.cast"(%arg3) {nova.group = 0
// CHECK: nova.cast"(%arg4) {nova.group = 2 : i64, nova.kind = "loops"}
