// Beside each chart a button that saves it as PNG, drawn by the browser at twice its size.
for (const svg of document.querySelectorAll("figure > svg")) {
  const button = document.createElement("button");
  button.textContent = "PNG";
  button.title = "Save this chart as PNG";
  button.onclick = () => {
    const copy = svg.cloneNode(true);
    const style = document.createElementNS(svg.namespaceURI, "style");
    style.textContent = document.getElementById("of-charts").textContent;
    copy.prepend(style);
    const { width, height } = svg.viewBox.baseVal;
    copy.setAttribute("width", 2 * width);
    copy.setAttribute("height", 2 * height);
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = 2 * width;
      canvas.height = 2 * height;
      const context = canvas.getContext("2d");
      context.fillStyle = "#fff";
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(image, 0, 0);
      const link = document.createElement("a");
      link.download = `${svg.parentElement.dataset.name}.png`;
      link.href = canvas.toDataURL();
      link.click();
    };
    image.src = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  };
  svg.after(button);
}
