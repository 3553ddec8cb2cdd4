package main

import (
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"strings"

	pb "github.com/kube-proxy-ebpf/kube-proxy-ebpf/proto/localv1"
)

// keep writes the cluster IPs and ports of a state to the set `frontends` of the nftables table `inet NFT_TABLE`, in one
// transaction; rules of others can match `ip daddr . meta l4proto . th dport @frontends`.
func keep(s state) {
	table := os.Getenv("NFT_TABLE")
	if table == "" {
		return
	}
	var elements []string
	for _, it := range s[pb.Set_ServicesSet] {
		service := it.(*pb.Service)
		for _, ip := range service.Ips.GetClusterIps().GetV4() {
			for _, port := range service.Ports {
				// What the brain sends is never pasted into a command unchecked.
				if net.ParseIP(ip) != nil && pb.Protocol_name[int32(port.Protocol)] != "" {
					elements = append(elements, fmt.Sprintf("%s . %s . %d", ip, strings.ToLower(port.Protocol.String()), port.Port))
				}
			}
		}
	}
	set := "inet " + table + " frontends"
	text := "add table inet " + table + "\n" +
		"add set " + set + " { type ipv4_addr . inet_proto . inet_service; }\nflush set " + set + "\n"
	if len(elements) > 0 {
		text += "add element " + set + " { " + strings.Join(elements, ", ") + " }\n"
	}
	nft := exec.Command("nft", "-f", "-")
	nft.Stdin = strings.NewReader(text)
	if output, err := nft.CombinedOutput(); err != nil {
		log.Print("nft: ", err, ": ", strings.TrimSpace(string(output)), "; the set stays as it was")
	}
}
