// A backend that prints every change, keeps an nftables set ($NFT_TABLE), and says where connections go. docs/contract.md
// has the rules.
// Questions such as `lookup 10.1.0.7 10.96.0.1 80 TCP` come on standard input; changes are printed on standard error.
//
// docs/contract.md, "In Go", has the commands that build and test it.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"math/rand"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	pb "github.com/kube-proxy-ebpf/kube-proxy-ebpf/proto/localv1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// A complete state: Services and endpoints by path.
type state map[pb.Set]map[string]proto.Message

var current atomic.Value

const minDelay, maxDelay = 50 * time.Millisecond, 10 * time.Second

// The longest pause before the next attempt to connect.
var delay = minDelay

func empty() state { return state{pb.Set_ServicesSet: {}, pb.Set_EndpointsSet: {}} }

// copy returns what later changes do not affect.
func (s state) copy() state {
	copied := empty()
	for set, objects := range s {
		for path, it := range objects {
			copied[set][path] = it
		}
	}
	return copied
}

// follow follows one stream until it ends.
func follow(target string) error {
	network, address := "tcp", strings.TrimPrefix(target, "tcp://")
	if path := strings.TrimPrefix(target, "unix://"); path != target {
		network, address = "unix", path
	}
	dial := func(context.Context, string) (net.Conn, error) { return net.Dial(network, address) }
	connection, err := grpc.Dial("passthrough:///localhost", grpc.WithInsecure(), grpc.WithContextDialer(dial))
	if err != nil {
		return err
	}
	defer connection.Close()
	stream, err := pb.NewSetsClient(connection).Watch(context.Background())
	if err != nil {
		return err
	}
	received, isAnswered := current.Load().(state).copy(), true
	for {
		if isAnswered {
			// If the stream has ended, Recv says why.
			_ = stream.Send(&pb.WatchReq{NodeName: os.Getenv("NODE_NAME")})
			isAnswered = false
		}
		item, err := stream.Recv()
		if err != nil {
			return err
		}
		switch op := item.Op.(type) {
		case *pb.OpItem_Reset_: // What is not sent again is gone at the next sync; until then the last state stays.
			received = empty()
		case *pb.OpItem_Set:
			var message proto.Message = &pb.Service{}
			if op.Set.Ref.Set == pb.Set_EndpointsSet {
				message = &pb.Endpoint{}
			}
			if objects := received[op.Set.Ref.Set]; objects != nil && proto.Unmarshal(op.Set.Bytes, message) == nil {
				objects[op.Set.Ref.Path] = message
				log.Print("+ ", op.Set.Ref.Path)
			}
		case *pb.OpItem_Delete:
			delete(received[op.Delete.Set], op.Delete.Path)
			log.Print("- ", op.Delete.Path)
		case *pb.OpItem_Sync:
			current.Store(received.copy())
			keep(received)
			isAnswered = true
			delay = minDelay
		}
	}
}

func main() {
	current.Store(empty())
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			var source, destination, protocol string
			var number int32
			_, _ = fmt.Sscanf(lines.Text(), "lookup %s %s %d %s", &source, &destination, &number, &protocol)
			fmt.Println(lookup(source, destination, number, protocol))
		}
		os.Exit(0)
	}()
	jitter := rand.New(rand.NewSource(time.Now().UnixNano()))
	for ; ; delay *= 2 {
		log.Print(follow(os.Getenv("KUBE_PROXY_EBPF_TARGET")), "; the last state stays; reconnecting")
		if delay > maxDelay {
			delay = maxDelay
		}
		time.Sleep(delay/2 + time.Duration(jitter.Int63n(int64(delay/2))))
	}
}
