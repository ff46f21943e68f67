// RUN: nova-opt form-dispatches
// Joining %0's kernel would move the gradient behind the marker that says it is there.
func.func @step(%x: tensor<64xf32>, %y: tensor<64xf32>) -> (tensor<64xf32>, tensor<64xf32>) {
  %0 = "nova.exp"(%x) : (tensor<64xf32>) -> tensor<64xf32>
  "nova.bucket_ready"() {bucket = 0 : i64} : () -> ()
  %1 = "nova.exp"(%y) : (tensor<64xf32>) -> tensor<64xf32>
  %2 = "nova.add"(%0, %1) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
  return %0, %2 : tensor<64xf32>, tensor<64xf32>
}
// CHECK: nova.exp{{.*}}nova.group = 0
// CHECK: nova.bucket_ready
// CHECK: nova.exp{{.*}}nova.group = 1
// CHECK: nova.add{{.*}}nova.group = 1
