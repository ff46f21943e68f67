// RUN: nova-opt precision
// f64 contractions and those in a torch.autocast region keep their operands.

// CHECK-LABEL: func.func @step
// CHECK-NOT:     nova.cast
// CHECK:         return
module attributes {nova.precision = "bf16"} {
  func.func @step(%x: tensor<3x5xf64>, %h: tensor<3x5xbf16>, %i: tensor<5x3xbf16>) -> (tensor<3x3xf64>, tensor<3x3xbf16>) {
    %0 = "nova.linear"(%x, %x) : (tensor<3x5xf64>, tensor<3x5xf64>) -> tensor<3x3xf64>
    %1 = "nova.matmul"(%h, %i) : (tensor<3x5xbf16>, tensor<5x3xbf16>) -> tensor<3x3xbf16>
    return %0, %1 : tensor<3x3xf64>, tensor<3x3xbf16>
  }
}
