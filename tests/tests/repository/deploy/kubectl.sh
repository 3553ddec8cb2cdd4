#!/bin/sh
# Stands for kubectl. A pod is, as the plugin asks for it: node, UID, for a static pod its UID on the node, name, whether it is in
# the network namespace of the node, addresses. Any other call is printed; of a trace also the names of pods in its input.
case "$*" in
*' get pods '*spec.nodeName=worker-1,*) echo pod/p1; echo pod/p2 ;;
*' get pods '*) ;;
*metadata.name=client*|*status.podIP=10.244.1.7*) echo 'worker-1|0f-1||default/client||10.244.1.7 fd00::7' ;;
*metadata.name=static*) echo 'worker-1|0f-2|abc|kube-system/static|true|192.0.2.1' ;;
*metadata.name=other*) echo 'worker-2|0f-3||default/other||10.244.2.7' ;;
*spec.nodeName=worker-1*) echo 'worker-1|0f-1||default/client||10.244.1.7'; echo 'worker-1|0f-2|abc|kube-system/static|true|' ;;
'get pods '*) ;;
*) printf '%s\n' "$*"; if [ -p /dev/stdin ]; then echo input; fi
   case "$*" in *' trace '*) head -n 2 ;; esac ;;
esac
