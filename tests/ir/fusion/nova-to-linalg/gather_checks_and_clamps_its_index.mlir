// RUN: nova-opt nova-to-linalg
// The index is checked once a row; the table is read as a whole, always in bounds.
func.func private @k(%table: tensor<10x4xf32>, %ids: tensor<6xi64>) -> tensor<6x4xf32>
    attributes {nova.kernel = "loops", nova.inplace = [], nova.raises = "IndexError: index {value}"} {
  %0 = "nova.take"(%table, %ids) : (tensor<10x4xf32>, tensor<6xi64>) -> tensor<6x4xf32>
  return %0 : tensor<6x4xf32>
}
// CHECK: func.func private @k(%[[TABLE:.*]]: tensor<10x4xf32>
// CHECK-SAME: nova.raises = "IndexError: index {value}"
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel"]
// CHECK: %[[BAD:.*]] = arith.cmpi uge
// CHECK: "nova.check"(%[[BAD]], %{{.*}}) : (i1, i64) -> ()
// CHECK: linalg.generic {{.*}}iterator_types = ["parallel", "parallel"]
// CHECK: tensor.extract %[[TABLE]]
