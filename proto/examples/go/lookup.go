package main

import (
	"fmt"
	"net"
	"os"
	"sort"
	"strings"

	pb "github.com/kube-proxy-ebpf/kube-proxy-ebpf/proto/localv1"
)

// port returns the port and the scopes of an endpoint for a port of its Service; 0 if it does not serve that port.
func port(endpoint *pb.Endpoint, service *pb.Service, index int) (int32, *pb.EndpointScopes) {
	own, hasIndex := service.Ports[index], false
	name := own.Name
	if name == "" {
		name = own.TargetPortName
	}
	for _, it := range endpoint.PortOverrides {
		hasIndex = hasIndex || it.Index != nil
	}
	for _, it := range endpoint.PortOverrides {
		if hasIndex && it.Index != nil && int(*it.Index) == index || !hasIndex && it.Name == name {
			if it.Scopes != nil {
				return it.Port, it.Scopes
			}
			return it.Port, endpoint.Scopes
		}
	}
	if hasIndex || name != "" {
		return 0, nil
	}
	if own.TargetPort != 0 {
		return own.TargetPort, endpoint.Scopes
	}
	return own.Port, endpoint.Scopes
}

// ips returns the addresses of the same family as an address.
func ips(set *pb.IPSet, address string) []string {
	if strings.Contains(address, ":") {
		return set.GetV6()
	}
	return set.GetV4()
}

func has(list []string, text string) bool {
	return strings.Contains(" "+strings.Join(list, " ")+" ", " "+text+" ")
}

func within(cidrs []string, address string) bool {
	for _, it := range cidrs {
		if _, network, err := net.ParseCIDR(it); err == nil && network.Contains(net.ParseIP(address)) {
			return true
		}
	}
	return false
}

func lookup(source, destination string, number int32, protocol string) string {
	s := current.Load().(state)
	inside := within(strings.Split(os.Getenv("KUBE_PROXY_EBPF_CLUSTER_CIDRS"), ","), source)
	isNode := has(strings.Split(os.Getenv("KUBE_PROXY_EBPF_NODE_ADDRESSES"), ","), destination)
	for path, it := range s[pb.Set_ServicesSet] {
		service := it.(*pb.Service)
		clusters := ips(service.Ips.ClusterIps, destination)
		outside := append(ips(service.Ips.ExternalIps, destination), ips(service.Ips.LoadBalancerIps, destination)...)
		for index, own := range service.Ports {
			isCluster := own.Port == number && has(clusters, destination)
			isOwn := isCluster || own.Port == number && has(outside, destination)
			isNodePort := isNode && len(clusters) > 0 && own.NodePort == number
			if own.Protocol.String() != protocol || !isOwn && !isNodePort {
				continue
			}
			for _, filter := range service.IpFilters {
				if isOwn && !isCluster && has(ips(filter.TargetIps, destination), destination) && !within(filter.SourceRanges, source) {
					return "drop"
				}
			}
			var targets []string
			for key, it := range s[pb.Set_EndpointsSet] {
				if !strings.HasPrefix(key, path+"/") {
					continue
				}
				target, scopes := port(it.(*pb.Endpoint), service, index)
				cluster := scopes.GetInternal() || scopes.GetExternal()
				if scopes != nil && scopes.Cluster != nil {
					cluster = *scopes.Cluster
				}
				if target != 0 && (isCluster && scopes.Internal || !isCluster && (inside && cluster || !inside && scopes.External)) {
					for _, ip := range ips(it.(*pb.Endpoint).Ips, destination) {
						targets = append(targets, net.JoinHostPort(ip, fmt.Sprint(target)))
					}
				}
			}
			sort.Strings(targets)
			any := own.GetHasAnyEndpoint()
			switch {
			case len(targets) > 0:
				return strings.Join(targets, " ")
			case any.GetV4() && !strings.Contains(destination, ":"), any.GetV6() && strings.Contains(destination, ":"):
				return "drop"
			}
			return "refuse"
		}
	}
	return ""
}
