// RUN: nova-opt simplify
// Ops on repeated numbers are folded by their reference meaning, in their own dtype; choices by constants are made.

// CHECK-LABEL: func.func @arithmetic
// CHECK-DAG:     %[[C:.*]] = "nova.constant"() {value = dense<2.500000e+00> : tensor<f32>}
// CHECK-DAG:     %[[H:.*]] = "nova.constant"() {value = dense<1.000980e-01> : tensor<bf16>}
// CHECK-DAG:     "nova.broadcast"(%[[C]])
// CHECK-DAG:     "nova.broadcast"(%[[H]])
func.func @arithmetic() -> (tensor<3x5xf32>, tensor<4xbf16>) {
  %0 = "nova.constant"() {value = dense<1.0> : tensor<f32>} : () -> tensor<f32>
  %1 = "nova.constant"() {value = dense<1.5> : tensor<f32>} : () -> tensor<f32>
  %2 = "nova.broadcast"(%0) {dims = array<i64>} : (tensor<f32>) -> tensor<3x5xf32>
  %3 = "nova.add"(%2, %1) : (tensor<3x5xf32>, tensor<f32>) -> tensor<3x5xf32>
  %4 = "nova.constant"() {value = dense<0.1> : tensor<4xf32>} : () -> tensor<4xf32>
  %5 = "nova.cast"(%4) : (tensor<4xf32>) -> tensor<4xbf16>
  return %3, %5 : tensor<3x5xf32>, tensor<4xbf16>
}

// CHECK-LABEL: func.func @choices
// CHECK-NEXT:    return %arg0, %arg1, %arg1
func.func @choices(%x: tensor<3xf32>, %y: tensor<3xf32>, %c: tensor<3xi1>) -> (tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) {
  %true = "nova.constant"() {value = dense<true> : tensor<i1>} : () -> tensor<i1>
  %false = "nova.logical_not"(%true) : (tensor<i1>) -> tensor<i1>
  %0 = "nova.where"(%true, %x, %y) : (tensor<i1>, tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  %1 = "nova.where"(%false, %x, %y) : (tensor<i1>, tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  %2 = "nova.where"(%c, %y, %y) : (tensor<3xi1>, tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  return %0, %1, %2 : tensor<3xf32>, tensor<3xf32>, tensor<3xf32>
}
