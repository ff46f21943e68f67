// RUN: nova-opt remat
// The cast of the matmul's result, which stands between the matmul and the op that reads %pre, sinks with it.
// CHECK:      "nova.gelu_backward"(%{{.*}}, %[[PRE:[a-z0-9]+]])
// CHECK-NEXT: %[[AGAIN:.*]] = "nova.gelu"(%[[PRE]]) {{.*}}nova.again = true
// CHECK-NEXT: %[[DW:.*]] = "nova.matmul"(%{{.*}}, %[[AGAIN]])
// CHECK-NEXT: "nova.cast"(%[[DW]])
module {
  func.func @step(%pre: tensor<256x256xf32>, %w: tensor<256x256xf32>) -> (tensor<256x256xbf16>, tensor<256x256xf32>) {
    %h = "nova.gelu"(%pre) {approximate = "none"} : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %0 = "nova.matmul"(%h, %w) : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %1 = "nova.tanh"(%0) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %2 = "nova.tanh"(%1) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %3 = "nova.tanh"(%2) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %4 = "nova.tanh"(%3) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %5 = "nova.tanh"(%4) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %6 = "nova.tanh"(%5) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %7 = "nova.tanh"(%6) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %8 = "nova.tanh"(%7) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %9 = "nova.tanh"(%8) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %10 = "nova.tanh"(%9) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %11 = "nova.tanh"(%10) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %12 = "nova.tanh"(%11) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %13 = "nova.tanh"(%12) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %14 = "nova.tanh"(%13) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %15 = "nova.tanh"(%14) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %16 = "nova.tanh"(%15) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %17 = "nova.tanh"(%16) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %18 = "nova.tanh"(%17) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %19 = "nova.tanh"(%18) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %20 = "nova.tanh"(%19) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %21 = "nova.tanh"(%20) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %22 = "nova.tanh"(%21) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %23 = "nova.tanh"(%22) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %24 = "nova.tanh"(%23) : (tensor<256x256xf32>) -> tensor<256x256xf32>
    %dw = "nova.matmul"(%24, %h) : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    %dwb = "nova.cast"(%dw) : (tensor<256x256xf32>) -> tensor<256x256xbf16>
    %dp = "nova.gelu_backward"(%24, %pre) {approximate = "none"} : (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
    return %dwb, %dp : tensor<256x256xbf16>, tensor<256x256xf32>
  }
}
