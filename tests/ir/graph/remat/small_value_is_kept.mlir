// RUN: nova-opt remat
// A value of one kilobyte is kept: a kernel costs more than it frees.
// CHECK: nova.gelu"
// CHECK-NOT: nova.again
module {
  func.func @step(%pre: tensor<16x16xf32>, %w: tensor<16x16xf32>) -> (tensor<16x16xf32>, tensor<16x16xf32>) {
    %h = "nova.gelu"(%pre) {approximate = "none"} : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %0 = "nova.matmul"(%h, %w) : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %1 = "nova.tanh"(%0) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %2 = "nova.tanh"(%1) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %3 = "nova.tanh"(%2) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %4 = "nova.tanh"(%3) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %5 = "nova.tanh"(%4) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %6 = "nova.tanh"(%5) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %7 = "nova.tanh"(%6) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %8 = "nova.tanh"(%7) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %9 = "nova.tanh"(%8) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %10 = "nova.tanh"(%9) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %11 = "nova.tanh"(%10) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %12 = "nova.tanh"(%11) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %13 = "nova.tanh"(%12) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %14 = "nova.tanh"(%13) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %15 = "nova.tanh"(%14) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %16 = "nova.tanh"(%15) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %17 = "nova.tanh"(%16) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %18 = "nova.tanh"(%17) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %19 = "nova.tanh"(%18) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %20 = "nova.tanh"(%19) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %21 = "nova.tanh"(%20) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %22 = "nova.tanh"(%21) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %23 = "nova.tanh"(%22) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %24 = "nova.tanh"(%23) : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %dw = "nova.matmul"(%24, %h) : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %dp = "nova.gelu_backward"(%24, %pre) {approximate = "none"} : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    return %dw, %dp : tensor<16x16xf32>, tensor<16x16xf32>
  }
}
