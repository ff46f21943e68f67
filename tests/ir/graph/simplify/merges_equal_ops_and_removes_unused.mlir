// RUN: nova-opt simplify
// Equal ops become one; ops without uses go, random ones with equal seed and stream included.

// CHECK-LABEL: func.func @step
// CHECK-NEXT:    %[[E:.*]] = "nova.exp"(%arg0)
// CHECK-NEXT:    %[[U:.*]] = "nova.uniform"(%arg1) {stream = 3 : i64}
// CHECK-NEXT:    %[[V:.*]] = "nova.uniform"(%arg1) {stream = 4 : i64}
// CHECK-NEXT:    return %[[E]], %[[E]], %[[U]], %[[U]], %[[V]]
func.func @step(%x: tensor<3x5xf32>, %seed: tensor<i64>)
    -> (tensor<3x5xf32>, tensor<3x5xf32>, tensor<7xf32>, tensor<7xf32>, tensor<7xf32>) {
  %0 = "nova.exp"(%x) : (tensor<3x5xf32>) -> tensor<3x5xf32>
  %1 = "nova.exp"(%x) : (tensor<3x5xf32>) -> tensor<3x5xf32>
  %2 = "nova.log"(%0) : (tensor<3x5xf32>) -> tensor<3x5xf32>
  %3 = "nova.uniform"(%seed) {stream = 3 : i64} : (tensor<i64>) -> tensor<7xf32>
  %4 = "nova.uniform"(%seed) {stream = 3 : i64} : (tensor<i64>) -> tensor<7xf32>
  %5 = "nova.uniform"(%seed) {stream = 4 : i64} : (tensor<i64>) -> tensor<7xf32>
  return %0, %1, %3, %4, %5 : tensor<3x5xf32>, tensor<3x5xf32>, tensor<7xf32>, tensor<7xf32>, tensor<7xf32>
}
