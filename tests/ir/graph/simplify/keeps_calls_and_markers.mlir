// RUN: nova-opt simplify
// Calls into PyTorch may raise, and markers mean something to other ranks: both stay, unused or not.

// CHECK-LABEL: func.func @step
// CHECK-COUNT-2: nova.aten_call
// CHECK:         nova.bucket_ready
func.func @step(%x: tensor<3xf32>) -> tensor<3xf32> {
  %0 = "nova.aten_call"(%x) {op = "aten.sin.default", args = "{\"args\": [{\"t\": 0}], \"kwargs\": {}}", operandSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>} : (tensor<3xf32>) -> tensor<3xf32>
  %1 = "nova.aten_call"(%x) {op = "aten.sin.default", args = "{\"args\": [{\"t\": 0}], \"kwargs\": {}}", operandSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>, resultSegmentSizes = array<i32: 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0>} : (tensor<3xf32>) -> tensor<3xf32>
  "nova.bucket_ready"() {bucket = 0 : i64} : () -> ()
  return %0 : tensor<3xf32>
}
