
FOLDER=target/conformance
KUBECONFIG_FILE=$FOLDER/kubeconfig
# Programs that are kept between runs.
TOOLS=target/tools/conformance
TESTS=$TOOLS/tests-$KUBERNETES
# The conformance tests need two.
WORKERS=2

# kind's default is docker, and it warns if that is named.
[ "$TOOL" = docker ] || export KIND_EXPERIMENTAL_PROVIDER="$TOOL"

say() { printf '%12s %s\n' "$1" "$2" >&2; }
step() { purpose=$1 && say Running "$purpose"; }
kind() { "$TOOLS/kind-$KIND" "$@"; }
kubectl() { "$TOOLS/kubectl-$KUBERNETES" --kubeconfig="$KUBECONFIG_FILE" "$@"; }
# In the namespace of the proxy and of CoreDNS.
kubectl_system() { kubectl --namespace=kube-system "$@"; }

# Fetches a file, which is to become the program $1, from $2, and compares it with the checksum published at $3.
fetch() {
    mkdir -p "${1%/*}"
    curl --fail --location --silent --show-error --retry 3 --output "$1.part" "$2"
    sum=$(curl --fail --location --silent --show-error --retry 3 "$3" | cut -d' ' -f1)
    echo "$sum  $1.part" | sha256sum --check --quiet
}

fetch_program() {
    step "fetch $1, once"
    shift
    test ! -x "$1" || return 0
    fetch "$@"
    chmod +x "$1.part"
    mv "$1.part" "$1"
}

# As much as possible after a failure: logs and state of the nodes.
keep_evidence() {
    say Collecting "logs and state of the nodes, in $FOLDER"
    pods=--selector=app.kubernetes.io/name=kube-proxy-ebpf
    step "keep the state of the cluster"
    kubectl get nodes,services,endpointslices --all-namespaces --output=yaml >$FOLDER/objects.yaml
    step "keep the pods"
    kubectl get pods --all-namespaces --output=wide >$FOLDER/pods.txt
    step "keep the logs of kube-proxy-ebpf"
    kubectl_system logs $pods --all-containers --prefix --tail=-1 >$FOLDER/kube-proxy-ebpf.log
    step "keep the programmed state of each node"
    for pod in $(kubectl_system get pods $pods --output=name); do
        kubectl_system exec "$pod" -- /usr/local/bin/kube-proxy-ebpf dump >"$FOLDER/${pod#pod/}.dump"
    done
    step "keep kind's logs"
    kind export logs $FOLDER/logs --name "$NAME"
}

# Runs at the end in any case.
finish() {
    result=$?
    set +e
    trap - EXIT
    [ $result -eq 0 ] || say Failed "$purpose"
    if [ -n "$has_cluster" ]; then
        [ $result -eq 0 ] || keep_evidence
        if [ -n "$KEEP" ]; then
            say Kept "the cluster; its kubeconfig is $KUBECONFIG_FILE"
        else
            step "remove the cluster"
            kind delete cluster --name "$NAME" || result=1
        fi
    fi
    exit $result
}
has_cluster=
trap finish EXIT

### Before there is a cluster

step "remove the files of the last run"
rm -rf $FOLDER
mkdir -p $FOLDER/report $TOOLS

step "build the image"
build_image

step "write the image to a file"
"$TOOL" save --output $FOLDER/image.tar "$IMAGE"

URL=https://kind.sigs.k8s.io/dl/$KIND/kind-linux-$ARCH
fetch_program "kind $KIND" "$TOOLS/kind-$KIND" "$URL" "$URL.sha256sum"

URL=https://dl.k8s.io/release/$KUBERNETES/bin/linux/$ARCH/kubectl
fetch_program "kubectl $KUBERNETES" "$TOOLS/kubectl-$KUBERNETES" "$URL" "$URL.sha256"

step "fetch Kubernetes' tests $KUBERNETES, once"
URL=https://dl.k8s.io/release/$KUBERNETES/kubernetes-test-linux-$ARCH.tar.gz
if [ ! -x "$TESTS/e2e.test" ]; then
    fetch "$TESTS/e2e.test" "$URL" "$URL.sha256"
    tar -xzf "$TESTS/e2e.test.part" -C "$TESTS" --strip-components=3 \
        kubernetes/test/bin/ginkgo kubernetes/test/bin/e2e.test
    rm "$TESTS/e2e.test.part"
fi

### The cluster, with kube-proxy-ebpf instead of kube-proxy

step "create the cluster"
cat >$FOLDER/kind.yaml <<EOF
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
networking:
  ipFamily: $IP_FAMILY
  kubeProxyMode: none
  # Without the host's search domains.
  dnsSearch: []
nodes:
  - role: control-plane
  - role: worker
  - role: worker
EOF
has_cluster=yes
kind create cluster --name "$NAME" --image "$NODE_IMAGE" --config $FOLDER/kind.yaml \
    --kubeconfig "$KUBECONFIG_FILE" --retain --wait 3m

# systemd does not mount it in a container. Each node gets a file system of its own.
for node in control-plane worker worker2; do
    step "mount a bpf file system on $NAME-$node"
    "$TOOL" exec "$NAME-$node" sh -c 'mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf'
done

step "load the image on the nodes"
kind load image-archive $FOLDER/image.tar --name "$NAME"

step "configure the address of the API server"
kubectl_system create configmap kube-proxy-ebpf-api-server "--from-literal=url=https://$NAME-control-plane:6443"

step "deploy"
kubectl apply --kustomize deploy/overlays/kind

step "wait until every node serves"
kubectl_system rollout status daemonset/kube-proxy-ebpf --timeout=5m

# As Kubernetes' own IPv6 jobs do: names are not forwarded to a resolver that is reachable only over IPv4.
if [ "$IP_FAMILY" = ipv6 ]; then
    step "keep DNS inside the cluster"
    kubectl_system get configmap coredns --output=yaml |
        sed -e '/forward \. /,/}/d' -e '/^ *loop$/d' -e '/fallthrough/d' |
        kubectl apply --filename=-
fi

# CoreDNS reaches the API server by its Service.
step "wait until DNS is ready"
kubectl_system rollout status deployment/coredns --timeout=5m

### The tests

# The environment is for the tests of RuntimeClass.
step "run the tests"
KUBERNETES_CONFORMANCE_TEST=y KUBE_CONTAINER_RUNTIME=remote \
    KUBE_CONTAINER_RUNTIME_ENDPOINT=unix:///run/containerd/containerd.sock \
    KUBE_CONTAINER_RUNTIME_NAME=containerd \
    "$TESTS/ginkgo" --nodes="$PARALLEL" --timeout=6h --no-color --focus="$FOCUS" --skip="$SKIP" \
    "$TESTS/e2e.test" -- --kubeconfig="$KUBECONFIG_FILE" --provider=skeleton --num-nodes=$WORKERS \
    --report-dir=$FOLDER/report --disable-log-dump=true
