// RUN: nova-opt split-loss-head
// Autocast widens the logits for the loss. What is stored for the backward are the contraction's own, half as large: the
// gradient widens them again, and the partials pick the target's logit so that the merge needs none.
// CHECK:      %[[X:.*]] = "nova.matmul"
// CHECK-NEXT: %[[WIDE:.*]] = "nova.cast"(%[[X]])
// CHECK-NEXT: %[[P:.*]]:3 = "nova.sce_partials"(%[[WIDE]],
// CHECK-NEXT: %[[LOSS:.*]]:2 = "nova.sce_merge"(%[[P]]#0, %[[P]]#1, %[[P]]#2,
// CHECK-NEXT: %[[AGAIN:.*]] = "nova.cast"(%[[X]])
// CHECK-NEXT: "nova.sce_backward"(%{{.*}}, %[[AGAIN]],
module {
  func.func @step(%h: tensor<4096x64xbf16>, %w: tensor<64x32000xbf16>, %t: tensor<4096xi64>, %g: tensor<f32>) -> (tensor<f32>, tensor<4096x32000xf32>) {
    %x = "nova.matmul"(%h, %w) : (tensor<4096x64xbf16>, tensor<64x32000xbf16>) -> tensor<4096x32000xbf16>
    %y = "nova.cast"(%x) : (tensor<4096x32000xbf16>) -> tensor<4096x32000xf32>
    %l:2 = "nova.sce"(%y, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64} : (tensor<4096x32000xf32>, tensor<4096xi64>) -> (tensor<f32>, tensor<4096xf32>)
    %d = "nova.sce_backward"(%g, %y, %t, %l#1) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64} : (tensor<f32>, tensor<4096x32000xf32>, tensor<4096xi64>, tensor<4096xf32>) -> tensor<4096x32000xf32>
    return %l#0, %d : tensor<f32>, tensor<4096x32000xf32>
  }
}
