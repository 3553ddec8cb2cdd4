// The module of the generated package, below which the example lies.
module github.com/kube-proxy-ebpf/kube-proxy-ebpf/proto

go 1.19

require (
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
