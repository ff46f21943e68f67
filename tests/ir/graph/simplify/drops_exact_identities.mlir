// RUN: nova-opt simplify
// x*1, x/1, x-0, x+(-0.0), max(x,-inf) are x for every bit pattern; x+0.0 is not (-0.0) and x*0 is not (NaN).

// CHECK-LABEL: func.func @identities
// CHECK-NEXT:    return %arg0, %arg0, %arg0, %arg0, %arg0
func.func @identities(%x: tensor<3x5xf32>)
    -> (tensor<3x5xf32>, tensor<3x5xf32>, tensor<3x5xf32>, tensor<3x5xf32>, tensor<3x5xf32>) {
  %one = "nova.constant"() {value = dense<1.0> : tensor<f32>} : () -> tensor<f32>
  %zero = "nova.constant"() {value = dense<0.0> : tensor<f32>} : () -> tensor<f32>
  %minus = "nova.constant"() {value = dense<-0.0> : tensor<f32>} : () -> tensor<f32>
  %inf = "nova.constant"() {value = dense<0xFF800000> : tensor<f32>} : () -> tensor<f32>
  %ones = "nova.broadcast"(%one) {dims = array<i64>} : (tensor<f32>) -> tensor<3x5xf32>
  %0 = "nova.mul"(%ones, %x) : (tensor<3x5xf32>, tensor<3x5xf32>) -> tensor<3x5xf32>
  %1 = "nova.div"(%x, %one) : (tensor<3x5xf32>, tensor<f32>) -> tensor<3x5xf32>
  %2 = "nova.sub"(%x, %zero) : (tensor<3x5xf32>, tensor<f32>) -> tensor<3x5xf32>
  %3 = "nova.add"(%minus, %x) : (tensor<f32>, tensor<3x5xf32>) -> tensor<3x5xf32>
  %4 = "nova.maximum"(%x, %inf) : (tensor<3x5xf32>, tensor<f32>) -> tensor<3x5xf32>
  return %0, %1, %2, %3, %4 : tensor<3x5xf32>, tensor<3x5xf32>, tensor<3x5xf32>, tensor<3x5xf32>, tensor<3x5xf32>
}

// CHECK-LABEL: func.func @not_identities
// CHECK:         "nova.add"
// CHECK:         "nova.mul"
// CHECK:         "nova.sub"
// CHECK:         "nova.div"
func.func @not_identities(%x: tensor<3xf32>, %y: tensor<1xf32>)
    -> (tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>) {
  %one = "nova.constant"() {value = dense<1.0> : tensor<3xf32>} : () -> tensor<3xf32>
  %zero = "nova.constant"() {value = dense<0.0> : tensor<f32>} : () -> tensor<f32>
  %0 = "nova.add"(%x, %zero) : (tensor<3xf32>, tensor<f32>) -> tensor<3xf32>
  %1 = "nova.mul"(%x, %zero) : (tensor<3xf32>, tensor<f32>) -> tensor<3xf32>
  %2 = "nova.sub"(%zero, %x) : (tensor<f32>, tensor<3xf32>) -> tensor<3xf32>
  %3 = "nova.div"(%one, %x) : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  %4 = "nova.mul"(%one, %y) : (tensor<3xf32>, tensor<1xf32>) -> tensor<3xf32>
  return %0, %1, %2, %3, %4 : tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>
}

// CHECK-LABEL: func.func @powers_of_two
// CHECK-DAG:     %[[Q:.*]] = "nova.constant"() {value = dense<2.500000e-01> : tensor<f32>}
// CHECK-DAG:     "nova.mul"(%arg0, %[[Q]])
// CHECK:         "nova.div"
func.func @powers_of_two(%x: tensor<3xf32>) -> (tensor<3xf32>, tensor<3xf32>) {
  %four = "nova.constant"() {value = dense<4.0> : tensor<f32>} : () -> tensor<f32>
  %three = "nova.constant"() {value = dense<3.0> : tensor<f32>} : () -> tensor<f32>
  %0 = "nova.div"(%x, %four) : (tensor<3xf32>, tensor<f32>) -> tensor<3xf32>
  %1 = "nova.div"(%x, %three) : (tensor<3xf32>, tensor<f32>) -> tensor<3xf32>
  return %0, %1 : tensor<3xf32>, tensor<3xf32>
}
