// RUN: nova-opt simplify
// A cast that loses nothing composes with the next one; a cast that rounds is what the user wrote, and stays.

// CHECK-LABEL: func.func @exact
// CHECK-NEXT:    %[[D:.*]] = "nova.cast"(%arg0) : (tensor<4xbf16>) -> tensor<4xf64>
// CHECK-NEXT:    return %arg0, %[[D]]
func.func @exact(%x: tensor<4xbf16>) -> (tensor<4xbf16>, tensor<4xf64>) {
  %0 = "nova.cast"(%x) : (tensor<4xbf16>) -> tensor<4xf32>
  %1 = "nova.cast"(%0) : (tensor<4xf32>) -> tensor<4xbf16>
  %2 = "nova.cast"(%0) : (tensor<4xf32>) -> tensor<4xf64>
  return %1, %2 : tensor<4xbf16>, tensor<4xf64>
}

// CHECK-LABEL: func.func @rounding
// CHECK-NEXT:    %[[L:.*]] = "nova.cast"(%arg0) : (tensor<4xf32>) -> tensor<4xbf16>
// CHECK-NEXT:    %[[W:.*]] = "nova.cast"(%[[L]]) : (tensor<4xbf16>) -> tensor<4xf32>
// CHECK-NEXT:    return %[[W]]
func.func @rounding(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = "nova.cast"(%x) : (tensor<4xf32>) -> tensor<4xbf16>
  %1 = "nova.cast"(%0) : (tensor<4xbf16>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// CHECK-LABEL: func.func @integer
// CHECK:         "nova.cast"(%arg0) : (tensor<4xi64>) -> tensor<4xf32>
// CHECK-NEXT:    "nova.cast"
func.func @integer(%x: tensor<4xi64>) -> tensor<4xi64> {
  %0 = "nova.cast"(%x) : (tensor<4xi64>) -> tensor<4xf32>
  %1 = "nova.cast"(%0) : (tensor<4xf32>) -> tensor<4xi64>
  return %1 : tensor<4xi64>
}
